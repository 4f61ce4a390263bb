"""Draws docs/call.svg: what PyTorch launches and moves for a layer in a training step, and what gsbn does.

    python docs/draw_call.py     # rewrites the picture; tests/project/test_drawing.py compares it, and what it says

The layer is KernelBench's problem 33, Linear with a bias, a scale for each feature and BatchNorm1d, with B rows in
bfloat16 on a Hopper GPU. A launch reads each of its operands once and writes each of its results once; that a product
reads tiles of an operand again, mostly from the L2 cache, is left out on both sides.

PyTorch's launches are those of its operators: ``addmm``, ``mul``, ``native_batch_norm`` and their derivatives. On a
GPU ``native_batch_norm`` of a matrix is three kernels (statistics, running statistics, normalisation), its derivative
two. gsbn's are what its planner decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

B, I, O, ITEMSIZE = 1024, 8192, 8192, 2
MB = {"B×I": B * I * ITEMSIZE / 1e6, "O×I": O * I * ITEMSIZE / 1e6, "B×O": B * O * ITEMSIZE / 1e6}
SHAPES = {"x": "B×I", "dx": "B×I", "weight": "O×I", "dweight": "O×I"}  # all other matrices are B×O


class Launch(NamedTuple):
    """A launch: the operator or kernel that it is of, what it does, and the matrices that it reads and writes."""

    name: str
    does: str
    reads: str = ""
    writes: str = ""
    again: float = 0.0  # so much of B×O is written, and read, once more

    def megabytes(self) -> tuple[float, float]:
        """What it reads and what it writes."""
        read, written = (sum(MB[SHAPES.get(m, "B×O")] for m in text.split()) for text in (self.reads, self.writes))
        return read + self.again * MB["B×O"], written + self.again * MB["B×O"]


PYTORCH = {
    "Forward": [
        Launch("addmm", "z = x · weightᵀ + bias", "x weight", "z"),
        Launch("mul", "s = z · scale", "z", "s"),
        Launch("add_", "the count of batches"),
        Launch("native_batch_norm", "mean and variance of s", "s"),
        Launch("native_batch_norm", "running statistics"),
        Launch("native_batch_norm", "y", "s", "y"),
    ],
    "Backward": [
        Launch("native_batch_norm_backward", "sums over the batch: dgamma, dbeta", "dy s"),
        Launch("native_batch_norm_backward", "ds", "dy s", "ds"),
        Launch("mul", "t = ds · z", "ds z", "t"),
        Launch("mul", "dz = ds · scale", "ds", "dz"),
        Launch("sum", "dscale, of t", "t"),
        Launch("mm", "dx = dz · weight", "dz weight", "dx"),
        Launch("mm", "dweight = dzᵀ · x", "dz x", "dweight"),
        Launch("sum", "dbias, of dz", "dz"),
    ],
}
# Of the two tiles that each CTA has in the forward, the first waits for the batch's statistics in y's memory.
GSBN = {
    "Forward": [
        Launch(
            "forward_sm90",
            "all of it; d = z − mean, for the backward",
            "x weight",
            "y d",
            again=0.5,
        ),
    ],
    "Backward": [
        Launch("backward_fused", "dg = dz, dgamma, dbeta, dscale, dbias", "dy d", "dg"),
        Launch("forward_sm90", "dx = dg · weight", "dg weight", "dx"),
        Launch("forward_sm90", "dweight = dgᵀ · x", "dg x", "dweight"),
    ],
}
READ, WRITTEN, INK, FAINT = "#8fb4d9", "#d1495b", "#222", "#666"
WIDTH, COLUMN, LEFT, LINE, TOP = 1000, 500, 24, 36, 96
BOLD = ' font-weight="bold"'
SCALE = 1.45  # pixels for a megabyte


def megabytes(launches: list[Launch]) -> float:
    """What these launches read and write."""
    return sum(sum(launch.megabytes()) for launch in launches)


def text(x: float, y: float, content: str, size: int = 13, colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{more}>{escape(content)}</text>'


def bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="9" fill="{colour}"/>'


def drawn(launch: Launch, x: float, y: float) -> list[str]:
    """A launch as two lines of text and bar."""
    name = f'<tspan font-family="monospace" font-weight="bold">{escape(launch.name)}</tspan>'
    shapes = [f'<text x="{x:g}" y="{y:g}" font-size="12.5" fill="{INK}">{name}  {escape(launch.does)}</text>']
    read, written = launch.megabytes()
    if not read + written:
        return [*shapes, text(x, y + 15, "only vectors", 11, FAINT)]
    shapes += [bar(x, y + 6, SCALE * read, READ), bar(x + SCALE * read, y + 6, SCALE * written, WRITTEN)]
    said = f"{read + written:.0f} MB: {', '.join(launch.reads.split())}"
    said += f" → {', '.join(launch.writes.split())}" if launch.writes else ""
    return [*shapes, text(x + SCALE * (read + written) + 6, y + 14, said, 11, FAINT)]


def picture() -> str:
    """The drawing, as SVG."""
    shapes = [
        text(LEFT, 30, "One training step of a layer: what is launched, and what it moves", 18, more=BOLD),
        text(LEFT, 51, f"Linear, scale, BatchNorm1d; x ({B}, {I}), weight ({O}, {I}), bfloat16, on a Hopper GPU. "
             f"A matrix of B×O has {MB['B×O']:.0f} MB, the weight {MB['O×I']:.0f}.", 12.5, FAINT),
        bar(LEFT, 62, 20, READ), text(LEFT + 26, 71, "read", 12), bar(LEFT + 66, 62, 20, WRITTEN),
        text(LEFT + 92, 71, "written", 12),
    ]  # fmt: skip
    y = TOP
    for part in PYTORCH:
        if y > TOP:
            shapes.append(f'<line x1="{LEFT}" x2="{WIDTH - LEFT}" y1="{y - 14}" y2="{y - 14}" stroke="#ccc"/>')
        for side, (title, launches) in enumerate((("PyTorch eager", PYTORCH[part]), ("gsbn", GSBN[part]))):
            x, count = LEFT + side * COLUMN, len(launches)
            head = f"{part}, {title}: {count} launch{'es' * (count > 1)}, {megabytes(launches):.0f} MB"
            shapes.append(text(x, y + 6, head, 14, more=BOLD))
            for i, launch in enumerate(launches):
                shapes += drawn(launch, x, y + 30 + i * LINE)
        if waiting := sum(launch.again for launch in GSBN[part]):
            said = (
                f"{2 * waiting * MB['B×O']:.0f} MB of it: tiles that wait in y's memory for the statistics of the batch"
            )
            shapes.append(text(LEFT + COLUMN, y + 30 + LINE, said, 11, FAINT))
        y += 30 + max(len(PYTORCH[part]), len(GSBN[part])) * LINE + 16
    totals = [[launch for part in side.values() for launch in part] for side in (PYTORCH, GSBN)]
    for side, launches in enumerate(totals):
        said = f"Together: {len(launches)} launches, {megabytes(launches):.0f} MB"
        shapes.append(text(LEFT + side * COLUMN, y, said, 14, more=BOLD))
    height = y + 20
    title = "What PyTorch and gsbn launch for a training step of a layer, and the bytes that each launch moves"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{title}">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#fff"/>', *shapes, "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    file = Path(__file__).with_name("call.svg")
    file.write_text(picture(), encoding="utf-8")
    print(f"Wrote {file}")
