"""The graph behind an artifact as one SVG file that needs nothing else."""

from collections.abc import Iterable, Mapping
from html import escape

from grpo.lineage.lock import StageEntry
from grpo.lineage.trace import Node

BOX_WIDTH = 170
BOX_HEIGHT = 40
GAP_X = 70
GAP_Y = 16
MARGIN = 20
FOOTER_HEIGHT = 40
SWEEPS = 8  # of the ordering within columns; it settles after a few

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1f2933}"
    ".box{fill:#f5f7fa;stroke:#7b8794}.root{fill:#d9e8ff;stroke:#2563eb;stroke-width:2}"
    ".small{font-size:10px;fill:#52606d}.edge{fill:none;stroke:#9aa5b1}"
)

Graph = Mapping[str, set[str]]  # stage -> the stages it reads from


def draw_svg(root: Node) -> str:
    """Returns an SVG with a box per stage, sources of data to the left, `root` to the right.

    Hovering over a box shows its command, code revision, parameters, inputs and outputs.
    """
    nodes = {node.stage.name: node for node in root.walk() if node.stage}
    graph = {name: _upstream(nodes.values(), name) for name in nodes}
    columns = order_columns(graph)
    places = {
        name: (MARGIN + x * (BOX_WIDTH + GAP_X), MARGIN + y * (BOX_HEIGHT + GAP_Y))
        for x, column in enumerate(columns)
        for y, name in enumerate(column)
    }
    width = 2 * MARGIN + len(columns) * (BOX_WIDTH + GAP_X) - GAP_X
    height = MARGIN + max(map(len, columns)) * (BOX_HEIGHT + GAP_Y) + FOOTER_HEIGHT
    edges = [
        _edge(places[before], places[name])
        for name, upstream in reduce_edges(graph).items()
        for before in sorted(upstream)
    ]
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


def order_columns(graph: Graph) -> list[list[str]]:
    """Returns stages in columns by their longest way from a source, few crossings within."""
    depth: dict[str, int] = {}

    def deepen(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((deepen(each) for each in sorted(graph[name])), default=-1)
        return depth[name]

    for name in sorted(graph):
        deepen(name)
    columns: list[list[str]] = [[] for _ in range(1 + max(depth.values(), default=0))]
    for name in sorted(graph):
        columns[depth[name]].append(name)
    downstream = {name: {each for each in graph if name in graph[each]} for name in graph}
    for sweep in range(SWEEPS):
        neighbours = graph if sweep % 2 == 0 else downstream
        for column in columns if sweep % 2 == 0 else reversed(columns):
            heights = {each: i / len(c) for c in columns for i, each in enumerate(c)}
            column.sort(key=lambda name: (_middle(heights, neighbours[name], name), name))
    return columns


def reduce_edges(graph: Graph) -> dict[str, set[str]]:
    """Returns the graph without the edges that a longer way already shows."""
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


def _middle(heights: Mapping[str, float], neighbours: set[str], name: str) -> float:
    """Returns the mean height of a stage's neighbours, or its own height without any."""
    values = [heights[each] for each in neighbours]
    return sum(values) / len(values) if values else heights[name]


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x0, y0 = start[0] + BOX_WIDTH, start[1] + BOX_HEIGHT / 2
    x1, y1 = end[0], end[1] + BOX_HEIGHT / 2
    bend = max((x1 - x0) / 2, GAP_X / 2)
    return (
        f'<path class="edge" d="M{x0} {y0:g} C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} '
        f'{x1} {y1:g}"/>'
    )


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
