"""How a report looks: plain text, rich, HTML. Last station of the report.

All three show the same: totals, one table with the worst tensors by several measures,
and the findings, each with its meaning, what helps, and the tensors that have it.
"""

import html
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adagc_jax.diagnosis import Diagnosis, ReportRow
    from adagc_jax.report import ClipReport

_WIDTH = 100
_HEADINGS = {
    "clip_rate": "Clipped most often",
    "consecutive_clips": "Clipped longest in a row",
    "norm_over_gamma": "Norm highest above its reference gamma",
    "norm_before": "Largest norms",
}
_NORMALISING = 0.9


def show(report: "ClipReport") -> None:
    """Prints a report: with rich on a terminal, as plain text elsewhere."""
    if sys.stdout.isatty() and _has_rich():
        from rich.console import Console

        Console().print(report)
    else:
        print(report)


def as_text(report: "ClipReport") -> str:
    """A report as plain ASCII, as far as the names are."""
    lines = [_title(report), *(f"  {line}" for line in _summary(report))]
    header, sections = _sections(report)
    widths = [max(10, len(cell) + 2) for cell in header[1:]]
    room = _WIDTH - 2 - sum(widths)
    longest = max((len(r[0]) for _, rows in sections for r in rows), default=0)
    name_width = min(max(longest, 24), room)

    def line(cells: Sequence[str]) -> str:
        numbers = (f"{c:>{w}}" for c, w in zip(cells[1:], widths, strict=True))
        return f"  {_elided(cells[0], name_width):<{name_width}}" + "".join(numbers)

    if sections:
        lines += ["", line(header)]
    for heading, rows in sections:
        lines += [heading, *(line(row) for row in rows)]
    for title, texts, members in _findings(report):
        lines += ["", title]
        for text in texts:
            lines += textwrap.wrap(
                text, _WIDTH, initial_indent="  ", subsequent_indent="  "
            )
        for name, detail in members:
            shown = f"{_elided(name, _WIDTH - 6 - len(detail))}  " if name else ""
            lines.append(f"    {shown}{detail}")
    return "\n".join(lines)


def as_rich(report: "ClipReport") -> Any:
    """A report as a renderable of rich."""
    try:
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(
            "A report for a terminal needs rich: pip install rich, or print(report)."
        ) from error
    parts: list[Any] = [Text(_title(report), style="bold")]
    parts += [Padding(Text(line), (0, 0, 0, 2)) for line in _summary(report)]
    header, sections = _sections(report)
    if sections:
        table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
        table.add_column(header[0], overflow="fold", min_width=16)
        for name in header[1:]:
            table.add_column(name, justify="right", no_wrap=True)
        for heading, rows in sections:
            table.add_row(Text(heading, style="bold cyan"))
            for row in rows:
                table.add_row(Text(f"  {row[0]}"), *row[1:])
        parts += [Text(""), table]
    for title, (meaning, remedy), members in _findings(report):
        parts += [Text(""), Text(title, style="bold yellow")]
        parts.append(Padding(Text(meaning), (0, 0, 0, 2)))
        parts.append(Padding(Text(remedy, style="green"), (0, 0, 0, 2)))
        for name, detail in members:
            shown = f"    {name}  " if name else "    "
            parts.append(Text.assemble(shown, (detail, "dim")))
    return Group(*parts)


def as_html(report: "ClipReport") -> str:
    """A report as a fragment of HTML, every name escaped."""
    header, sections = _sections(report)
    summary = "".join(f"<li>{_escaped(line)}</li>" for line in _summary(report))
    out = [f"<div><h4>{_escaped(_title(report))}</h4><ul>{summary}</ul>"]
    if sections:
        out.append(f"<table><thead>{_html_row(header, 'th')}</thead><tbody>")
        for heading, rows in sections:
            out.append(
                f'<tr><th colspan="{len(header)}" style="text-align:left">'
                f"{_escaped(heading)}</th></tr>"
            )
            out += [_html_row(row, "td") for row in rows]
        out.append("</tbody></table>")
    for title, (meaning, remedy), members in _findings(report):
        out.append(
            f"<p><b>{_escaped(title)}</b><br/>{_escaped(meaning)}<br/>"
            f"<i>{_escaped(remedy)}</i></p><ul>"
        )
        for name, detail in members:
            code = f"<code>{_escaped(name)}</code> " if name else ""
            out.append(f"<li>{code}{_escaped(detail)}</li>")
        out.append("</ul>")
    return "".join(out) + "</div>"


def _has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True


def _title(report: "ClipReport") -> str:
    tensors = sum(not row.is_tree for row in report.rows)
    updates = max((int(numbers["step"]) for _, numbers in report.totals), default=0)
    return f"Clipping report: {_count(tensors, 'tensor')}, {_count(updates, 'update')}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _summary(report: "ClipReport") -> list[str]:
    lines = []
    for prefix, numbers in report.totals:
        lead = f"clipper {prefix.rstrip('/')}: " if prefix else ""
        if not numbers["step"]:
            lines.append(f"{lead}no update was made yet")
            continue
        lines += [
            f"{lead}{_percent(numbers['clip_rate'])} of all tensors and updates "
            f"clipped, {_percent(numbers['fraction_clipped'])} of tensors in the last "
            "update",
            f"{lead}global norm {numbers['norm_before']:.4g} before, "
            f"{numbers['norm_after']:.4g} after; smallest scale "
            f"{numbers['min_scale']:.3g}; non-finite norms so far "
            f"{numbers['nonfinite']:,}",
        ]
        if numbers["clip_rate"] >= _NORMALISING:
            lines.append(
                f"{lead}nearly everything is clipped: this normalises gradients "
                "rather than clipping spikes"
            )
    return lines


Cells = tuple[str, ...]


def _sections(report: "ClipReport") -> tuple[Cells, list[tuple[str, list[Cells]]]]:
    """The header of the table, and the rows under each heading."""
    has_gamma = any(row.gamma is not None for row in report.rows)
    header = ("", "clip rate", "in a row", "norm")
    header += ("norm/gamma",) if has_gamma else ()
    header += ("active", "non-finite")

    def cells(row: "ReportRow") -> Cells:
        ratio = row.norm_over_gamma
        return (
            _printable(row.name),
            _percent(row.clip_rate),
            f"{row.consecutive_clips:,}",
            f"{row.norm_before:.3g}",
            *(("-" if ratio is None else f"{ratio:.3g}",) if has_gamma else ()),
            f"{row.active:,}",
            f"{row.nonfinite:,}",
        )

    rankings = ["clip_rate", "consecutive_clips", "norm_over_gamma"]
    if any(not row.is_group for row in report.rows):
        rankings.append("norm_before")
    ranked = [(_HEADINGS[by], report.worst(by)) for by in rankings]
    return header, [(title, [cells(r) for r in rows]) for title, rows in ranked if rows]


def _findings(
    report: "ClipReport",
) -> list[tuple[str, tuple[str, str], list[tuple[str, str]]]]:
    """Title, meaning and remedy, and the names with details of each finding."""
    result = []
    for said, rows in report.findings:
        members = [
            (_printable(row.name), _detail(row, said)) for row in rows[: report.top]
        ]
        if len(rows) > report.top:
            members.append(("", f"... and {len(rows) - report.top:,} more"))
        title = f"{said.kind}: {_count(len(rows), 'tensor')}"
        result.append((title, (said.meaning, f"Helps: {said.remedy}"), members))
    return result


def _detail(row: "ReportRow", like: "Diagnosis") -> str:
    return next(d.detail for d in row.diagnoses if d.kind == like.kind)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _elided(name: str, width: int) -> str:
    """A name that fits: paths differ most at their ends."""
    if len(name) <= width:
        return name
    start = (width - 3) // 3
    return f"{name[:start]}...{name[start + 3 - width :]}"


def _printable(name: str) -> str:
    return name if name.isprintable() else name.encode("unicode_escape").decode()


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _html_row(cells: Cells, tag: str) -> str:
    style = ' style="text-align:{}"'
    return (
        "<tr>"
        + "".join(
            f"<{tag}{style.format('right' if i else 'left')}>{_escaped(c)}</{tag}>"
            for i, c in enumerate(cells)
        )
        + "</tr>"
    )
