"""What `mkdocs build` adds to the pages of this folder: the reference, made from the code, and other documents."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Documents outside of docs/ that are pages of the site, and what links to them are turned into.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    made = {target: (ROOT / source).read_text(encoding="utf-8") for source, target in OUTSIDE.items()}
    made |= {"reference/command-line.md": command_line(), "reference/python.md": python()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as GitHub wants them -> as the site has them."""
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri in OUTSIDE.values():
        markdown = re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)
    for source, target in OUTSIDE.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}(#[\w-]+)?\)", rf"]({up}{target}\1)", markdown)
    return markdown


# ---------------------------------------------------------------------------------------------- command line


def command_line() -> str:
    from typer.main import get_command

    from tapas.cli.main import app

    lines = ["# Command line", "", "Made from the code, by the same texts that `tapas --help` prints.", ""]
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        lines += [f"## tapas {name}", "", f"    {usage(name, command)}", "", flat(command.help or ""), ""]
        lines += ["| | |", "|---|---|", *(option_row(option) for option in command.params if option.name != "help"), ""]
    return "\n".join(lines)


def usage(name: str, command: Any) -> str:
    return " ".join(
        ["tapas", name, "[OPTIONS]", *(p.metavar for p in command.params if p.param_type_name == "argument")]
    )


WORDS = {int: "N", float: "NUMBER", str: "TEXT", Path: "FILE"}


def option_row(option: Any) -> str:
    if option.param_type_name == "argument":
        said = f"`{option.metavar}`"
    else:
        word = "" if option.is_flag else f" {option.metavar or WORDS.get(option.type_descriptor.annotation, 'TEXT')}"
        said = f"`{', '.join([*option.opts, *option.secondary_opts])}{word}`"
    said = said.replace("|", "\\|")
    shown = option.default not in (None, "", False, []) and not option.required
    default = f" Default: `{option.default}`." if shown and "Default:" not in (option.help or "") else ""
    return f"| {said} | {escaped(option.help or '')}{default} |"


# ---------------------------------------------------------------------------------------------------- Python


def python() -> str:
    import tapas

    lines = ["# Python", "", "Made from the code: all that `import tapas` offers.", ""]
    for name in sorted(tapas.__all__, key=str.lower):
        found = getattr(tapas, name)
        if inspect.isclass(found):
            lines += [*described(f"tapas.{name}", found, "class"), *members(name, found)]
        elif callable(found):
            lines += described(f"tapas.{name}", found, "def")
    return "\n".join(lines)


def described(name: str, found: Any, kind: str, level: int = 2) -> list[str]:
    heading = [f"{'#' * level} {name}", ""]
    try:
        signature = inspect.signature(found)
    except ValueError:
        return [*heading, flat(inspect.getdoc(found) or ""), ""]
    words = inspect.getdoc(found) or ""
    words = (
        "" if words.startswith(f"{name.rpartition('.')[2]}(") else words
    )  # a dataclass that has none says its fields
    text = f"{kind} {name.rpartition('.')[2]}{signature_text(signature)}"
    return [*heading, "```python", text, "```", "", flat(words), ""]


def signature_text(signature: inspect.Signature) -> str:
    """One parameter a line, where they do not fit into one."""
    parts = list(parameters(signature))
    returned = signature.return_annotation
    end = "" if returned is inspect.Signature.empty else f" -> {annotation(returned)}"
    short = f"({', '.join(parts)}){end}"
    return short if len(short) < 80 else "(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def parameters(signature: inspect.Signature) -> Iterator[str]:
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        said = "" if parameter.annotation is inspect.Parameter.empty else f": {annotation(parameter.annotation)}"
        default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        starred = starred or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        yield f"{prefix}{parameter.name}{said}{default}"


def annotation(found: Any) -> str:
    text = (
        found if isinstance(found, str) else getattr(found, "__name__", None) if inspect.isclass(found) else str(found)
    )
    return re.sub(r"\b(?:[a-z_][\w]*\.)+([A-Z]\w*)", r"\1", text or str(found))


def members(name: str, found: type) -> list[str]:
    lines: list[str] = []
    for member, value in vars(found).items():
        if member.startswith("_") or not inspect.getdoc(value):
            continue
        if isinstance(value, property):
            lines += [f"### {name}.{member}", "", flat(inspect.getdoc(value) or ""), ""]
        elif inspect.isfunction(value):
            lines += described(f"{name}.{member}", value, "def", level=3)
    return lines


def flat(text: str) -> str:
    """A docstring as Markdown: indented parts stay, the rest has nothing that would be taken for markup."""
    return "\n".join(line if line.startswith("    ") else escaped(line) for line in inspect.cleandoc(text).split("\n"))


def escaped(text: str) -> str:
    """Outside of `code`, where no character has a meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else plain(part) for part in parts)


def plain(text: str) -> str:
    return re.sub(r"([*_|\[\]])", r"\\\1", text.replace("<", "&lt;"))
