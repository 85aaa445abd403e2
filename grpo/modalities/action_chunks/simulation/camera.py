"""A ray-casting camera for scenes: few machines have the drivers that OpenGL needs."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8

WIDTH, HEIGHT = 160, 120  # pixels of a film's frame
EYE = np.array([0.95, 0.15, 0.8])  # camera position; all positions in meters, the arm at 0 0 0
TARGET = np.array([0.0, 0.64, 0.13])
FIELD_DEGREES = 34.0  # vertical field of view of a film's frame; all frames share its width
LAMP = np.array([0.35, 0.2, 2.2])
AMBIENT, SHADOW = 0.45, 0.3  # ambient light; fraction of the lamp's light left in its shadow
GAMMA = 1.4
BACKGROUND = 0.94
FAR = 10.0  # length of a ray
FLOOR = "floor"  # the geom that is drawn as background
IN_SHADOW = 0.02  # a point is in shadow if the lamp's ray ends this far before it
VISIBLE = np.array([1, 1, 1, 1, 0, 0], np.uint8)  # geom groups; group 4 has collision geoms
UNSET = (0.5, 0.5, 0.5, 1.0)  # MuJoCo's default color: the material decides
GOAL_COLOR, RIM_COLOR = (40, 220, 90), (15, 50, 25)
GOAL_PIXELS, GOAL_BREADTH, RIM_BREADTH = 5.5, 0.9, 0.8  # radius and half widths of the goal's ring
PIXEL = 2 * np.tan(np.radians(FIELD_DEGREES) / 2) / HEIGHT  # size of a film's pixel at one meter

Frame = UInt8[np.ndarray, "height width 3"]
Point = Float[np.ndarray, "3"]
Points = Float[np.ndarray, "height width 3"]


class Camera:
    """A camera at a fixed position beside the table; draws the current scene."""

    def __init__(self, model: Any, data: Any, *, width: int = WIDTH, height: int = HEIGHT) -> None:
        """Args:
        model, data: MuJoCo's.
        """
        self._model, self._data = model, data
        self._width, self._height = width, height
        self._zoom = width / WIDTH
        self._colors = _colors(model)
        self._floor = int(model.geom(FLOOR).id)

    def draw(self, goal: Point) -> Frame:
        """Returns a picture of the current scene with a ring around the goal."""
        rays = self._rays()
        geom, distance = _cast(self._model, self._data, EYE, rays)
        is_thing = (geom >= 0) & (geom != self._floor)
        points = EYE + rays * np.where(is_thing, distance, 0.0)[..., None]
        from_lamp = points - LAMP
        length = np.linalg.norm(from_lamp, axis=-1)
        from_lamp /= length[..., None]
        _, reached = _cast(self._model, self._data, LAMP, from_lamp)
        facing = np.abs((_normals(points) * from_lamp).sum(axis=-1))
        lit = facing * np.where(reached < length - IN_SHADOW, SHADOW, 1.0)
        light = AMBIENT + (1 - AMBIENT) * lit
        shade = np.where(is_thing[..., None], self._colors[geom] * light[..., None], BACKGROUND)
        frame = (shade.clip(0, 1) ** (1 / GAMMA) * 255).round().astype(np.uint8)
        return self._mark_goal(frame, goal)

    def locate(self, point: Point) -> tuple[float, float]:
        """Returns a point's column and row in a frame; the first pixel spans [-0.5, 0.5]."""
        forward, right, up = _axes()
        way = point - EYE
        scale = self._zoom / PIXEL / (way @ forward)
        return (
            float(scale * (way @ right) + (self._width - 1) / 2),
            float((self._height - 1) / 2 - scale * (way @ up)),
        )

    def _rays(self) -> Points:
        """Returns the unit direction of every pixel's center."""
        forward, right, up = _axes()
        pixel = PIXEL / self._zoom
        across = (np.arange(self._width) - (self._width - 1) / 2)[None, :, None] * pixel
        upward = ((self._height - 1) / 2 - np.arange(self._height))[:, None, None] * pixel
        rays = forward + across * right + upward * up
        unit: Points = rays / np.linalg.norm(rays, axis=-1, keepdims=True)
        return unit

    def _mark_goal(self, frame: Frame, goal: Point) -> Frame:
        """Returns a frame with the goal's ring on top, as many goals are inside objects."""
        column, row = self.locate(goal)
        rows = np.arange(self._height)[:, None]
        away = np.hypot(np.arange(self._width) - column, rows - row) / self._zoom
        off = np.abs(away - GOAL_PIXELS)[..., None]
        marked = np.where(off < GOAL_BREADTH + RIM_BREADTH, np.array(RIM_COLOR, np.uint8), frame)
        return np.where(off < GOAL_BREADTH, np.array(GOAL_COLOR, np.uint8), marked)


def _axes() -> tuple[Point, Point, Point]:
    """Returns the camera's forward, right and up directions."""
    forward = (TARGET - EYE) / np.linalg.norm(TARGET - EYE)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    return forward, right, np.cross(right, forward)


def _cast(
    model: Any, data: Any, origin: Point, rays: Points
) -> tuple[Int[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
    """Returns the first geom that each ray hits and its distance; -1 without a hit."""
    # Imported here: metaworld.py raises the error for a missing simulator.
    import mujoco

    shape = rays.shape[:2]
    geom, distance = np.zeros(shape, np.int32), np.zeros(shape)
    flat = np.ascontiguousarray(rays).ravel()
    mujoco.mj_multiRay(
        model, data, origin, flat, VISIBLE, 1, -1, geom.ravel(), distance.ravel(), geom.size, FAR
    )
    return geom, distance


def _normals(points: Points) -> Points:
    """Returns unit surface normals, estimated from each point and its neighbors."""
    normals = np.cross(_slope(points, axis=1), _slope(points, axis=0))
    length = np.linalg.norm(normals, axis=-1, keepdims=True)
    unit: Points = normals / np.where(length > 0, length, 1.0)
    return unit


def _slope(points: Points, axis: int) -> Points:
    """Returns the difference to the nearer neighbor, which is likely on the same surface."""
    ways = np.diff(points, axis=axis)
    first, last = ways.take([0], axis), ways.take([-1], axis)
    ahead, behind = np.concatenate([ways, last], axis), np.concatenate([first, ways], axis)
    is_nearer = (ahead**2).sum(axis=-1) <= (behind**2).sum(axis=-1)
    return np.where(is_nearer[..., None], ahead, behind)


def _colors(model: Any) -> Float[np.ndarray, "geom 3"]:
    """Returns each geom's color, or its material's color times the mean of its texture."""
    colors = np.array(model.geom_rgba[:, :3], np.float64)
    textures = [_mean_of_texture(model, each) for each in range(model.ntex)]
    for geom, material in enumerate(model.geom_matid):
        if material < 0 or tuple(model.geom_rgba[geom]) != UNSET:
            continue
        colors[geom] = model.mat_rgba[material, :3]
        for texture in model.mat_texid[material]:
            colors[geom] *= textures[texture] if texture >= 0 else 1.0
    return colors


def _mean_of_texture(model: Any, texture: int) -> Point:
    channels, start = model.tex_nchannel[texture], model.tex_adr[texture]
    size = model.tex_width[texture] * model.tex_height[texture] * channels
    texels = model.tex_data[start : start + size].reshape(-1, channels)[:, :3]
    return np.asarray(texels.mean(axis=0) / 255, np.float64)
