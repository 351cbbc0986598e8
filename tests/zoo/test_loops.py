"""AGC models train at batch 1 in the training loops of other libraries."""

import lightning
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torchvision.models import resnet18
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from benchmarks.zoo.measure import smooth_images
from deepcontrol import param_groups, to_agc

STEPS = 12


@pytest.fixture
def data() -> list[tuple[Tensor, int]]:
    """Two images with different labels, repeated."""
    images = smooth_images(2, (3, 64, 64))
    return [(images[i % 2], i % 2) for i in range(STEPS)]


def network() -> nn.Module:
    return to_agc(resnet18(num_classes=2))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.002, momentum=0.9)


def learned(losses: list[float]) -> bool:
    """Whether the losses of both images have at least halved."""
    return len(losses) == STEPS and sum(losses[-2:]) < 0.5 * sum(losses[:2])


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = network()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        assert len(images) == 1
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)


def test_lightning(data: list[tuple[Tensor, int]]) -> None:
    classifier = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(classifier, torch.utils.data.DataLoader(data, batch_size=1))
    assert learned(classifier.losses)


def test_accelerate(data: list[tuple[Tensor, int]]) -> None:
    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model), torch.utils.data.DataLoader(data, batch_size=1)
    )
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert learned(losses)


def test_gradient_accumulation_in_accelerate_is_exact() -> None:
    """Four steps of batch 1 equal one of batch 4, because samples are independent."""
    images, labels = smooth_images(4, (3, 64, 64)).double(), torch.tensor([0, 1, 0, 1])
    model = network().double()
    nn.functional.cross_entropy(model(images), labels).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(model)
    for i in range(4):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images[i : i + 1]), labels[i : i + 1])
            accelerator.backward(loss)
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_transformers_trainer(data: list[tuple[Tensor, int]], tmp_path: object) -> None:
    config = ResNetConfig(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_labels=2)
    config.embedding_size = 16
    model = to_agc(ResNetForImageClassification(config), example=data[0][0][None])
    options = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        num_train_epochs=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"pixel_values": image, "labels": label} for image, label in data]
    trainer = Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert min(losses[-4:]) < max(losses[:4])
