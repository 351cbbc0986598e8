"""The study's third part: the paper's proposals, and a recipe for segmentation.

The paper proposes mechanisms without results: deep layer-wise noise, GEMS (gated effective
minibatch size), momentum near one, and other estimates of the background. It also reports values of
lambda that the first part did not find.

When the rules were fixed: before any run with these mechanisms. Known at that time was the first
part on CamVid (results/camvid): AGC ends at 7.5% error and loss 0.278 at batch 4, BatchNorm at 7.6%
and 0.259; lambda ends within 0.02 of its start at 1 in all but the last layers; four times the
paper's learning rate diverges at batch 8. For the recipe the errors of these runs on the test split
were known as well: AGC 12.9% at batch 1, BatchNorm 12.3% at batch 4 and 12.7% at batch 8.

The protocol of the proposals is as small as can still answer: SegNet at half its width on crops of
192x256, 40 epochs with a cosine schedule, three seeds. All arms have the paper's learning rates; no
arm is tuned. Claims and their runs are in the order noise, GEMS, background, momentum, lambda, so
that an interrupted study answers the first ones. Left out: other noise levels, caps of GEMS and
window sizes, and lambda with 19 classes, for which CamVid has no labels.

The small protocol (proposals-small) is for a CPU, and for the time until the larger one has
finished: SegNet at an eighth of its width on images of 64x96, 20 epochs. Its settings were fixed
before its runs, after two pilots with another seed: five epochs of plain AGC at batch 1 ended at
66% error with the paper's learning rate and at 48% with twice the paper's, so that all arms have
twice the paper's. Claims and margins are those of the larger protocol. The claims on lambda were
first left out, because these networks are not trained to the end, and added when the first runs on
GEMS were known, none of which has another learning rate or start of lambda.

"The same" error is within one point, as in the first part. A difference in loss counts from 0.01
on, half of the difference between AGC and BatchNorm in the first part.

The recipe (`deepcontrol train --recipe best`) was assembled from the literature, not searched on
CamVid's 101 validation images: momentum 0.9 and weight decay 5e-4 as SegNet's authors, a cosine
schedule with a warm-up, the zoom and color ranges of nnU-Net, cross-entropy without class weights
as in most work since DeepLab, and the paper's learning rate. "At least as good" means by less than
0.3 points of error worse, 1 point of mean IoU, and 0.01 of loss: twice the standard deviation over
seeds of the first part, or less. The recipe is also tried with weight standardization and lambda
from 0.5 (claims named recipe-ws*), which the second part found to be better in residual networks.
BatchNorm first had the best of three learning rates; the best one was the lowest at both batch
sizes, so two lower ones were added, without a change to the claims or their margins. The control
recipe-ws-bn, with standardized filters in both, was added when all other runs were known and before
the first run of ws+bn.
"""

from dataclasses import replace

from ..optim import learning_rate
from .arms import Arm, Tuned, agc, bn, tuned, varied
from .claims import FASTER, Claim, higher, inside_of, no_worse, same
from .figure import PanelSpec
from .measures import EARLY, IOU, LAMBDA_MIDDLE, LAMBDA_RISE, LOSS
from .rules import Check

LOSS_MARGIN = 0.01


def proposal(claim_id: str, text: str, paper: str, *checks: Check) -> Claim:
    """Return a claim about a proposal, for which the paper has no figures."""
    return Claim(claim_id, text, paper, checks, beyond_paper=True)


# Noise

NOISE = (0.1, 0.3)  # relative to the standard deviation of each map
DROPOUT = (0.1, 0.5)  # as in DeepLab's successors, and in Bayesian SegNet
PAPER_ON_NOISE = "it reduces the loss"


def noisy(arm: Arm, level: float) -> Arm:
    return varied(arm, noise=level)


def dropped(level: float) -> Arm:
    return varied(agc(4), dropout=level)


NOISE_CLAIMS = (
    proposal(
        "noise-gap",
        "Without noise, AGC's validation loss is higher than BatchNorm's at batch size 4",
        "AGC slightly higher",
        higher(agc(4), bn(4), LOSS),
    ),
    *(
        proposal(
            f"noise-loss-{100 * level:.0f}",
            f"Noise of {level:.0%} lowers AGC's validation loss",
            PAPER_ON_NOISE,
            higher(agc(4), noisy(agc(4), level), LOSS),
        )
        for level in NOISE
    ),
    *(
        proposal(
            f"noise-closes-{100 * level:.0f}",
            f"With noise of {level:.0%}, AGC's validation loss is at most 0.01 above BatchNorm's",
            "not measured",
            *no_worse(noisy(agc(4), level), bn(4), LOSS, by=LOSS_MARGIN),
        )
        for level in NOISE
    ),
    *(
        proposal(
            f"noise-error-{100 * level:.0f}",
            f"Noise of {level:.0%} lowers AGC's final error",
            "it improves the error",
            higher(agc(4), noisy(agc(4), level)),
        )
        for level in NOISE
    ),
    *(
        proposal(
            f"noise-bn-{100 * level:.0f}",
            f"Noise of {level:.0%} does not lower BatchNorm's validation loss by more than 0.01",
            "not measured",
            higher(noisy(bn(4), level), bn(4), LOSS, by=-LOSS_MARGIN),
        )
        for level in NOISE
    ),
    proposal(
        "noise-dropout",
        "Noise of 10% lowers AGC's validation loss more than dropout does, of 10% and of 50%",
        "not measured",
        *(higher(dropped(level), noisy(agc(4), 0.1), LOSS) for level in DROPOUT),
    ),
)

# GEMS

GEMS, GEMS_CONTROL = varied(agc(1), gems="on"), varied(agc(1), gems="control")
GEMS_CLAIMS = (
    proposal(
        "gems",
        "GEMS lowers AGC's final error at batch size 1",
        "it shows promise",
        higher(agc(1), GEMS),
    ),
    proposal(
        "gems-early",
        "GEMS lowers the mean error over the first third of the epochs by more than 0.5 points",
        "deep layers learn faster",
        higher(agc(1), GEMS, EARLY, by=FASTER),
    ),
    proposal(
        "gems-control",
        "GEMS ends below its control, which has gradients of the same norm",
        "not measured",
        higher(GEMS_CONTROL, GEMS),
    ),
)

# Background

BACKGROUNDS = {
    "window:15": "The mean over a window of 15x15",
    "median": "The median",
    "quantile:0.3": "The 30% quantile",
    "trimmed:0.1": "The mean without the lowest and the highest 10%",
}
BACKGROUND_CLAIMS = (
    *(
        proposal(
            f"background-{name.partition(':')[0]}",
            f"{text} as the background lowers AGC's final error at batch size 1",
            "not measured",
            higher(agc(1), varied(agc(1), background=name)),
        )
        for name, text in BACKGROUNDS.items()
    ),
    proposal(
        "background-same",
        "With each of the four backgrounds, AGC's final error is that with the mean, within 1 "
        "point",
        "not measured",
        *(check for name in BACKGROUNDS for check in same(varied(agc(1), background=name), agc(1))),
    ),
)

# Momentum

MOMENTA = (0.97, 0.99, 0.997, 0.999)
PAPER_ON_MOMENTUM = "to be investigated"


def with_momentum(momentum: float) -> Arm:
    """Return AGC at batch size 1 with lr / (1 - momentum) as at momentum 0.9."""
    lr = round(learning_rate(1) * (1 - momentum) / (1 - 0.9), 10)
    return varied(agc(1, lr), momentum=momentum)


MOMENTUM_CLAIMS = (
    proposal(
        "momentum-same",
        "At batch size 1, AGC's final error is the same, within 1 point, with momentum 0.9, 0.97 "
        "and 0.99 if learning rate / (1 - momentum) is",
        PAPER_ON_MOMENTUM,
        *(check for m in MOMENTA[:2] for check in same(with_momentum(m), agc(1))),
    ),
    *(
        proposal(
            f"momentum-{m:g}",
            f"With momentum {m:g}, AGC's final error is at most 1 point above that with 0.9",
            PAPER_ON_MOMENTUM,
            *no_worse(with_momentum(m), agc(1)),
        )
        for m in MOMENTA[2:]
    ),
    proposal(
        "momentum-better",
        "Momentum 0.99 lowers AGC's final error at batch size 1",
        PAPER_ON_MOMENTUM,
        higher(agc(1), with_momentum(0.99)),
    ),
)

# Lambda

IN_PAPER = (0.65, 0.95)  # the paper's 0.7 to 0.9 at half depth, as in the first part
SAME_LAMBDA = 0.2
LONG = 120  # epochs


def fast_lambda(start: float = 1.0) -> Arm:
    """Return AGC at batch size 1 with ten times the learning rate for lambda."""
    arm = varied(agc(1), lambda_lr=10.0)
    return arm if start == 1 else varied(arm, lambda_start=start)


def _explains(claim_id: str, words: str, arm: Arm) -> Claim:
    text = f"{words}, lambda at half depth ends between 0.65 and 0.95"
    return proposal(claim_id, text, "0.7 to 0.9", inside_of(arm, LAMBDA_MIDDLE, *IN_PAPER))


LAMBDA_CLAIMS = (
    _explains("lambda-plain", "At batch size 1", agc(1)),
    # Before the others, because its runs take longest.
    _explains("lambda-epochs", f"After {LONG} epochs", varied(agc(1), epochs=LONG)),
    _explains("lambda-lr", "With ten times the learning rate for lambda", fast_lambda()),
    proposal(
        "lambda-starts",
        "With ten times the learning rate for lambda, starts at 0 and 2 end at the same lambda at "
        "half depth, within 0.2",
        "not measured",
        Check(
            measure=LAMBDA_MIDDLE,
            arm=fast_lambda(2.0),
            against=fast_lambda(0.0),
            low=-SAME_LAMBDA,
            high=SAME_LAMBDA,
        ),
    ),
    _explains("lambda-start-0", "From 0", varied(agc(1), lambda_start=0.0)),
    _explains("lambda-start-2", "From 2", varied(agc(1), lambda_start=2.0)),
    _explains("lambda-weights", "Without class weights", varied(agc(1), class_weights="none")),
    proposal(
        "lambda-last-lr",
        "With ten times the learning rate for lambda, it ends larger in the deepest layers than in "
        "the last one, by at least 0.5",
        "1 and 0",
        inside_of(fast_lambda(), LAMBDA_RISE, 0.5),
    ),
    proposal(
        "lambda-error",
        "A lambda that learns ten times as fast does not change AGC's final error by 1 point",
        "not measured",
        *same(fast_lambda(), agc(1)),
    ),
)

PROPOSAL_CLAIMS = (
    *NOISE_CLAIMS,
    *GEMS_CLAIMS,
    *BACKGROUND_CLAIMS,
    *MOMENTUM_CLAIMS,
    *LAMBDA_CLAIMS,
)

_NOISE_ARMS = (*(noisy(agc(4), level) for level in NOISE), *(dropped(level) for level in DROPOUT))
PROPOSAL_PANELS = (
    PanelSpec("a", "Noise on AGC, batch 4: loss", "val_loss", (agc(4), bn(4), *_NOISE_ARMS)),
    PanelSpec("b", "Noise on AGC, batch 4: error", "val_error", (agc(4), bn(4), *_NOISE_ARMS)),
    PanelSpec(
        "c",
        "Noise on BN, batch 4: loss",
        "val_loss",
        (bn(4), *(noisy(bn(4), level) for level in NOISE)),
    ),
    PanelSpec("d", "GEMS, batch 1", "val_error", (agc(1), GEMS, GEMS_CONTROL)),
    PanelSpec(
        "e",
        "Backgrounds, batch 1",
        "val_error",
        (agc(1), *(varied(agc(1), background=name) for name in BACKGROUNDS)),
    ),
    PanelSpec(
        "f", "Momentum, batch 1", "val_error", (agc(1), *(with_momentum(m) for m in MOMENTA))
    ),
    PanelSpec(
        "g",
        "Lambda, batch 1",
        "val_error",
        (
            agc(1),
            fast_lambda(),
            fast_lambda(0.0),
            fast_lambda(2.0),
            varied(agc(1), lambda_start=0.0),
            varied(agc(1), lambda_start=2.0),
        ),
    ),
)

# One recipe for segmentation

RECIPE_ERROR, RECIPE_IOU, RECIPE_LOSS = 0.3, 1.0, LOSS_MARGIN


def best_bn(batch: int) -> Tuned:
    """Return BatchNorm at the best of an eighth to twice the paper's learning rate."""
    factors = (0.125, 0.25, 0.5, 1, 2)
    return tuned(bn(batch), [round(factor * learning_rate(batch), 10) for factor in factors])


RIVALS = (best_bn(4), best_bn(8))
STANDARDIZED = replace(agc(1), norm="agc+ws")
STANDARDIZED_BN = tuned(
    replace(bn(4), norm="ws+bn"),
    [round(factor * learning_rate(4), 10) for factor in (0.25, 0.5, 1)],
)
BOTH_BATCHES = "BatchNorm's at batch sizes 4 and 8, at the best of five learning rates"


def recipe_claims(prefix: str, agc: str, arm: Arm) -> tuple[Claim, ...]:
    """Return the claims that an arm at batch 1 is as good as BatchNorm, and better."""
    return (
        proposal(
            f"{prefix}-error",
            f"{agc} final error at batch size 1 is at most 0.3 points above {BOTH_BATCHES}",
            "not measured",
            *(check for bn in RIVALS for check in no_worse(arm, bn, by=RECIPE_ERROR)),
        ),
        proposal(
            f"{prefix}-iou",
            f"{agc} mean IoU at batch size 1 is at most 1 point below {BOTH_BATCHES}",
            "not measured",
            *(higher(arm, bn, IOU, by=-RECIPE_IOU) for bn in RIVALS),
        ),
        proposal(
            f"{prefix}-loss",
            f"{agc} validation loss at batch size 1 is at most 0.01 above {BOTH_BATCHES}",
            "not measured",
            *(check for bn in RIVALS for check in no_worse(arm, bn, LOSS, by=RECIPE_LOSS)),
        ),
        proposal(
            f"{prefix}-better",
            f"{agc} final error at batch size 1 is below {BOTH_BATCHES}",
            "not measured",
            *(higher(bn, arm) for bn in RIVALS),
        ),
    )


RECIPE_CLAIMS = (
    *recipe_claims("recipe", "AGC's", agc(1)),
    *recipe_claims("recipe-ws", "With weight standardization, AGC's", STANDARDIZED),
    proposal(
        "recipe-ws",
        "Weight standardization lowers AGC's final error at batch size 1",
        "not measured",
        higher(agc(1), STANDARDIZED),
    ),
    proposal(
        "recipe-ws-bn",
        "With weight standardization in both, AGC's final error at batch size 1 is at most 0.3 "
        "points above BatchNorm's at batch size 4, at the best of three learning rates",
        "not measured",
        *no_worse(STANDARDIZED, STANDARDIZED_BN, by=RECIPE_ERROR),
    ),
)
_RECIPE_ARMS = (agc(1), STANDARDIZED, *RIVALS[0].arms, *RIVALS[1].arms, *STANDARDIZED_BN.arms)
RECIPE_PANELS = (
    PanelSpec("a", "Recipe: error", "val_error", _RECIPE_ARMS),
    PanelSpec("b", "Recipe: loss", "val_loss", _RECIPE_ARMS),
)
