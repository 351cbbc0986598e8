"""Convert study.json of format 1, which stored the numbers as text. No torch is imported."""

from typing import Any


def convert_format_1(old: dict[str, Any]) -> dict[str, Any]:
    """Convert study.json of format 1. Its measurements stay text."""
    protocol = dict(old["protocol"])
    protocol["lr_scale"] = protocol.pop("rates_times", 1.0)
    protocol.setdefault("classnet_data", protocol["data"])
    states = {"elsewhere": "locked", "not asked for": "not selected"}
    return {
        "protocol": protocol,
        "claims": [_claim_of_format_1(claim) for claim in old["claims"]],
        "grid": [
            {
                "batch": cell["batch"],
                "lr": cell["rate"],
                "error": _text_measurement("final error", f"batch {cell['batch']}", cell["error"]),
                "is_best": cell["is_best"],
            }
            for cell in old["grid"]
        ],
        "figure1": old["panels"],
        "figure2": old["beside"],
        "runs": [{**run, "state": states.get(run["state"], run["state"])} for run in old["runs"]],
        "pictured": old["samples"],
        "lambda_run": old["layers"],
        **{name: old[name] for name in ("preset_epochs", "seeds", "note", "command")},
    }


def _claim_of_format_1(old: dict[str, Any]) -> dict[str, Any]:
    checks = [
        {
            "kind": "mean",
            "measure": check["quantity"].split(":")[0],
            "verdict": check["verdict"],
            "text": {name: check[name] for name in ("quantity", "region", "rule", "found")},
        }
        for check in old["checks"]
    ]
    # Format 1 lists the measurements with the claim, not with the checks.
    checks[0]["operands"] = [_text_measurement(*value) for value in old["ours"]]
    return {
        "id": old["id"],
        "text": old["says"],
        "paper": old["paper"],
        "beyond_paper": old["paper"] in ("not in the paper", "not measured"),
        "verdict": old["verdict"],
        "checks": checks,
        "runs": old["runs"],
    }


def _text_measurement(measure: str, label: str, text: str) -> dict[str, Any]:
    return {"measure": measure, "arm": label, "label": label, "text": text}
