"""Draws the lineage graph of an artifact as one self-contained SVG."""

from collections.abc import Iterable, Mapping
from html import escape
from itertools import pairwise

from grpo.lineage.lock import StageEntry
from grpo.lineage.trace import Node

BOX_WIDTH = 170
BOX_HEIGHT = 40
GAP_X = 46
GAP_Y = 16
MARGIN = 20
FOOTER_HEIGHT = 40
SWEEPS = 8  # passes of the ordering within columns; it converges after a few

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2933}"
    ".box{fill:#f5f7fa;stroke:#7b8794}.root{fill:#d9e8ff;stroke:#2563eb;stroke-width:2}"
    ".small{font-size:10px;fill:#52606d}.edge{fill:none;stroke:#9aa5b1}"
)

Graph = Mapping[str, set[str]]  # stage -> the stages it reads from


def draw_svg(root: Node) -> str:
    """Returns an SVG with a box per stage, data sources on the left, `root` on the right.

    Hovering over a box shows its command, code revision, parameters, inputs and outputs.
    """
    nodes = {node.stage.name: node for node in root.walk() if node.stage}
    graph = {name: _upstream(nodes.values(), name) for name in nodes}
    columns, ways = order_columns(reduce_edges(graph))
    places = {
        name: (MARGIN + x * (BOX_WIDTH + GAP_X), MARGIN + y * (BOX_HEIGHT + GAP_Y))
        for x, column in enumerate(columns)
        for y, name in enumerate(column)
    }
    width = 2 * MARGIN + len(columns) * (BOX_WIDTH + GAP_X) - GAP_X
    height = MARGIN + max(map(len, columns)) * (BOX_HEIGHT + GAP_Y) + FOOTER_HEIGHT
    edges = [_edge([places[name] for name in way]) for way in ways]
    boxes = [
        _box(node, places[name], is_root=bool(root.stage and name == root.stage.name))
        for name, node in nodes.items()
    ]
    footer = f"{root.artifact.path}  md5 {root.artifact.digest}  revision {root.revision}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
            f"<style>{_STYLE}</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *edges,
            *boxes,
            f'<text class="small" x="{MARGIN}" y="{height - MARGIN / 2}">{escape(footer)}</text>',
            "</svg>\n",
        ]
    )


def order_columns(graph: Graph) -> tuple[list[list[str]], list[list[str]]]:
    """Returns names in columns by longest path from a source, and the path of each edge.

    An edge that spans several columns gets a dummy node in each column between, which reserves a
    lane for it. Names are ordered to reduce edge crossings (layered graph drawing).
    """
    depth: dict[str, int] = {}

    def deepen(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((deepen(each) for each in sorted(graph[name])), default=-1)
        return depth[name]

    for name in sorted(graph):
        deepen(name)
    ways = [
        [before, *(f"{before}>{name}>{x}" for x in range(depth[before] + 1, depth[name])), name]
        for name in sorted(graph)
        for before in sorted(graph[name])
    ]
    columns: list[list[str]] = [[] for _ in range(1 + max(depth.values(), default=0))]
    for name in sorted(graph):
        columns[depth[name]].append(name)
    for way in ways:
        for x, lane in enumerate(way[1:-1], start=depth[way[0]] + 1):
            columns[x].append(lane)
    _uncross(columns, ways)
    return columns, ways


def _uncross(columns: list[list[str]], ways: list[list[str]]) -> None:
    """Orders each column by the mean height of its neighbors (barycenter), forward and back."""
    before: dict[str, set[str]] = {name: set() for column in columns for name in column}
    after: dict[str, set[str]] = {name: set() for name in before}
    for way in ways:
        for left, right in pairwise(way):
            before[right].add(left)
            after[left].add(right)
    for sweep in range(SWEEPS):
        is_forward = sweep % 2 == 0
        neighbours = before if is_forward else after
        for column in columns if is_forward else reversed(columns):
            heights = {name: y for each in columns for y, name in enumerate(each)}
            column.sort(key=lambda name: (_middle(heights, neighbours[name], name), name))


def reduce_edges(graph: Graph) -> dict[str, set[str]]:
    """Returns the transitive reduction of the graph."""
    behind: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in behind:
            behind[name] = set(graph[name]).union(*(reach(each) for each in graph[name]))
        return behind[name]

    return {
        name: {each for each in upstream if not any(each in reach(other) for other in upstream)}
        for name, upstream in graph.items()
    }


def _upstream(nodes: Iterable[Node], name: str) -> set[str]:
    return {
        each.stage.name
        for node in nodes
        if node.stage and node.stage.name == name
        for each in node.inputs
        if each.stage and each.stage.name != name
    }


def _middle(heights: Mapping[str, int], neighbours: set[str], name: str) -> float:
    """Returns the mean height of a stage's neighbors, or its own height without neighbors."""
    values = [heights[each] for each in neighbours]
    return sum(values) / len(values) if values else float(heights[name])


def _edge(places: list[tuple[int, int]]) -> str:
    """Returns a path from box to box through the lanes between them."""
    middles = [(x, y + BOX_HEIGHT / 2) for x, y in places]
    x, y = middles[0][0] + BOX_WIDTH, middles[0][1]
    line = f"M{x} {y:g}"
    for x1, y1 in middles[1:]:
        line += f" C{x + GAP_X / 2:g} {y:g} {x1 - GAP_X / 2:g} {y1:g} {x1} {y1:g}"
        line += f" H{x1 + BOX_WIDTH}" if (x1, y1) != middles[-1] else ""
        x, y = x1 + BOX_WIDTH, y1
    return f'<path class="edge" d="{line}"/>'


def _box(node: Node, place: tuple[int, int], *, is_root: bool) -> str:
    x, y = place
    stage = node.stage
    assert stage is not None
    outs = ", ".join(out.path.removeprefix("artifacts/") for out in stage.outs) or "nothing"
    return (
        f'<g><title>{escape(_details(stage, node))}</title><rect class="'
        f'{"root" if is_root else "box"}" x="{x}" y="{y}" width="{BOX_WIDTH}" '
        f'height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="{x + 8}" y="{y + 16}">{escape(_fit(stage.name, 24))}</text>'
        f'<text class="small" x="{x + 8}" y="{y + 31}">{escape(_fit(outs, 30))}</text></g>'
    )


def _details(stage: StageEntry, node: Node) -> str:
    lines = [stage.command, f"revision {node.revision}"]
    lines += [f"in   {each.path}  {each.digest}" for each in stage.deps]
    lines += [f"out  {each.path}  {each.digest}" for each in stage.outs]
    lines += [f"{name} = {value}" for name, value in stage.params.items()]
    return "\n".join(lines)


def _fit(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"
