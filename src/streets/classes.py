"""The 19 Cityscapes classes by name; their order and colors are those of cityscapes.py."""

from enum import IntEnum

from deepcontrol.workbench.data.cityscapes import CLASSES, PALETTE
from deepcontrol.workbench.data.sample import VOID

__all__ = ["CLASSES", "FIRST_THING", "PALETTE", "VOID", "Class"]


class Class(IntEnum):
    """One member for each trainId, so that scene code never writes a bare number."""

    ROAD = 0
    SIDEWALK = 1
    BUILDING = 2
    WALL = 3
    FENCE = 4
    POLE = 5
    TRAFFIC_LIGHT = 6
    TRAFFIC_SIGN = 7
    VEGETATION = 8
    TERRAIN = 9
    SKY = 10
    PERSON = 11
    RIDER = 12
    CAR = 13
    TRUCK = 14
    BUS = 15
    TRAIN = 16
    MOTORCYCLE = 17
    BICYCLE = 18


FIRST_THING = Class.PERSON
