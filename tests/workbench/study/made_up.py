"""Artificial training curves."""

from deepcontrol.workbench.study.measures import Curve, LayerLambda

EPOCHS = 40


def curve(
    error: float = 10.0,
    *,
    early: float = 0.0,
    loss: float = 0.5,
    spikes: int = 0,
    lambdas: tuple[float, float, float] = (1.0, 0.8, 0.0),
    reach: tuple[float, float] = (0.0, 2.0),
    diverged: int | None = None,
) -> Curve:
    """Return a curve that falls to `error`.

    `early` is added to the first third. `lambdas` are (deepest, middle, last).
    """
    errors = [error + 20 / (1 + epoch) + early * (epoch < EPOCHS / 3) for epoch in range(EPOCHS)]
    for number in range(spikes):
        errors[16 + 5 * number] += 5
    deepest, middle, last = lambdas
    layers = [1.0] * 2 + [middle] * 5 + [deepest] * 5 + [middle] * 6 + [last]
    filters = [LayerLambda(mean, mean, mean) for mean in layers]
    filters[0] = LayerLambda(1.0, *reach)
    return Curve(tuple(errors), tuple([loss] * EPOCHS), tuple(filters), diverged)
