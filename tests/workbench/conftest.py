"""Fixtures of the workbench's tests."""

import io
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image


@pytest.fixture
def _unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save all figures empty: rendering takes seconds per page. They are still built."""
    picture = io.BytesIO()
    Image.new("RGB", (1, 1)).save(picture, "PNG")
    contents = {"svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>', "png": picture.getvalue()}

    def save(figure: Figure, file: io.BytesIO, *, format: str, **options: Any) -> None:
        file.write(contents[format])

    monkeypatch.setattr(Figure, "savefig", save)
