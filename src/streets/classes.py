"""The classes of the labels: the 19 training ids of Cityscapes, and void."""

from enum import IntEnum

VOID = 255  # the label of pixels without a class


class Class(IntEnum):
    """Training ids. The classes from PERSON on are objects and have instance numbers."""

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
