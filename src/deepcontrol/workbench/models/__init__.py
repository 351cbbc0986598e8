"""Networks: SegNet and ClassNet of the paper, ResNet-50 and a 3-D U-Net."""

from .blocks import NORMS, Norm
from .classnet import ClassNet
from .resnet import ResNet50
from .segnet import SegNet
from .unet3d import UNet3d

__all__ = ["NORMS", "ClassNet", "Norm", "ResNet50", "SegNet", "UNet3d"]
