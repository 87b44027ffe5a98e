"""Pages and docstrings made fit for mkdocs: a hook of mkdocs, and an extension of griffe, which reads docstrings."""

import re
import textwrap
from typing import Any

import griffe


def on_page_markdown(markdown: str, config: dict[str, Any], **_: object) -> str:
    """Point links that leave ``docs``, which work in the repository, to the repository."""
    return re.sub(r"\]\(\.\./(?!\.)", f"]({config['repo_url']}/blob/main/", markdown)


class RstMarkup(griffe.Extension):
    """Translate the roles and directives of docstrings to Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
            if isinstance(obj, griffe.Class) and any(str(base) == "NamedTuple" for base in obj.bases):
                obj.docstring.value = obj.docstring.value.replace("Args:\n", "Attributes:\n")


def to_markdown(docstring: str) -> str:
    """Translate formulas, references and the heading of examples; everything else means the same in both."""
    docstring = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.M)
    docstring = re.sub(r"^( *)\.\. math::((?: .*)?(?:\n(?:\1 +.*|(?= *\n\1 {2,})))*)", _display, docstring, flags=re.M)
    docstring = re.sub(r":math:`([^`]*)`", r"$\1$", docstring)
    return re.sub(r":(?:class|func|meth|attr|mod|exc):`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", docstring)


def _display(match: re.Match[str]) -> str:
    first, _, rest = match[2].partition("\n")
    formula = "\n".join(part for part in (first.strip(), textwrap.dedent(rest).strip("\n")) if part)
    return textwrap.indent(f"\n$$\n{formula}\n$$\n", match[1])
