"""Pages and docstrings made fit for mkdocs: a hook of mkdocs, and an extension of griffe, which reads docstrings."""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe


def on_page_markdown(markdown: str, config: dict[str, Any], **_: object) -> str:
    """Point links that leave ``docs`` to the repository, and put the names of a package where it stands in braces."""
    markdown = re.sub(
        r"\{\{ ([\w.]+) \}\}", lambda match: "\n\n".join(f"::: {name}" for name in public(match[1])), markdown
    )
    return re.sub(r"\]\(\.\./(?!\.)", f"]({config['repo_url']}/blob/main/", markdown)


def public(package: str) -> list[str]:
    """List what a package exports, each where it is defined: a function may have the name of its module."""
    root = Path(__file__).parent.parent
    tree = ast.parse((root / package.replace(".", "/") / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{alias.name}" for node in imports for alias in node.names]
    return sorted(names, key=lambda name: name.rpartition(".")[2].lower())


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
