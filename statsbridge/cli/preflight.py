"""`statsbridge preflight`: is this model, this data, this learning rate worth starting at all?"""

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import as_json, command, page, print_line, show_page

if TYPE_CHECKING:
    from statsbridge.debug.preflight import PreflightResult

FORMATS = ("table", "json")
EXIT_FAILED = 1
_STYLES = {"✗": "critical", "!": "warning", "–": "missing"}
_RETURNS = "(model, loss, loader)"
_EXAMPLE = "statsbridge preflight train:setup, where train.py has a function setup()"


def preflight(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns (model, loss, loader), or a dict of preflight's keywords.",
        ),
    ],
    *,
    output: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
) -> None:
    """Run the checklist: data, initial loss, dead units, gradients, one batch by heart, learning rate.

    It stops at the first test that fails, with exit status 1. MODULE is imported as Python would from this folder.
    """
    with command():
        from statsbridge.analyze.choices import unknown_choice
        from statsbridge.errors import ConfigError

        if output not in FORMATS:
            raise unknown_choice("format", output, FORMATS)
        if importlib.util.find_spec("torch") is None:
            raise ConfigError("preflight needs PyTorch: pip install 'statsbridge[torch]'")
        # What the user's code prints must not come between the lines of ours, or into the JSON.
        with contextlib.redirect_stdout(sys.stderr), _this_folder():
            result = _run(target)
        if output == "json":
            sys.stdout.write(as_json(_document(result)) + "\n")
        else:
            _print(result)
    if not result.passed:
        raise typer.Exit(EXIT_FAILED)


@contextlib.contextmanager
def _this_folder() -> Iterator[None]:
    """The working folder first on the path, as `python -m` has it."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _run(target: str) -> "PreflightResult":
    from statsbridge.debug import preflight as run_preflight

    return run_preflight(**_keywords(target, _call(target, _function(target))))


def _function(target: str) -> Callable[[], Any]:
    """The function that is meant. Raises ConfigError where there is none."""
    from statsbridge.analyze.choices import unknown_choice
    from statsbridge.errors import ConfigError

    module_name, colon, name = target.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{target!r} does not say MODULE:FUNCTION; for example {_EXAMPLE}")
    if module_name.endswith(".py") or "/" in module_name or "\\" in module_name:
        dotted = module_name.removesuffix(".py").strip("./\\").replace("/", ".").replace("\\", ".")
        raise ConfigError(f"{module_name} is a file: give the module's name, {dotted}:{name}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"importing {module_name} failed: {_said(error)}") from error
        raise ConfigError(f"there is no module {error.name} in {Path.cwd()} or on Python's path") from None
    except (Exception, SystemExit) as error:  # the user's code may raise anything, or call sys.exit() when imported
        raise ConfigError(f"importing {module_name} failed: {_said(error)}") from error
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            choices = [key for key, value in inspect.getmembers(module, inspect.isfunction) if _is_own(value, module)]
            if not choices:
                raise ConfigError(f"{module_name} has no function {name}")
            raise unknown_choice(f"function of {module_name}", name, choices)
        function = getattr(function, part)
    if not callable(function):
        raise ConfigError(f"{target} is a {type(function).__name__}: give a function that returns {_RETURNS}")
    return function  # type: ignore[no-any-return]


def _is_own(function: Callable[..., Any], module: ModuleType) -> bool:
    """Whether a module defines a function itself, for others to use."""
    return function.__module__ == module.__name__ and not function.__name__.startswith("_")


def _call(target: str, function: Callable[[], Any]) -> Any:
    from statsbridge.errors import ConfigError, StatsBridgeError

    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"{target} has to be called without arguments: {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        return function()
    except StatsBridgeError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ConfigError(f"{target} failed: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """An error of the user's code in a line: what it is, and where."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    if isinstance(error, SyntaxError):
        place = f" ({Path(error.filename or '?').name}, line {error.lineno})"
        return f"SyntaxError: {error.msg}{place}"
    ours = [frame for frame in frames if frame.filename != __file__]
    place = f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {error}{place}"


def _keywords(target: str, returned: Any) -> Mapping[str, Any]:
    """The keywords for `statsbridge.debug.preflight`. Raises ConfigError where something else was returned."""
    from statsbridge.analyze.choices import unknown_choice
    from statsbridge.debug import preflight as run_preflight
    from statsbridge.errors import ConfigError

    parameters = inspect.signature(run_preflight).parameters
    needed = [name for name, one in parameters.items() if one.default is one.empty]
    if isinstance(returned, Mapping):
        for name in returned:
            if name not in parameters:
                raise unknown_choice(f"keyword returned by {target}", name, parameters)
        missing = [name for name in needed if name not in returned]
        if missing:
            raise ConfigError(f"{target} returned a dict without {', '.join(missing)}")
        return dict(returned)
    if isinstance(returned, tuple) and len(returned) == len(needed):
        return dict(zip(needed, returned, strict=True))
    size = f" of {len(returned)}" if isinstance(returned, tuple) else ""
    raise ConfigError(
        f"{target} returned a {type(returned).__name__}{size}: it has to return {_RETURNS}, or a dict of keywords"
    )


def _print(result: "PreflightResult") -> None:
    console = page()
    for line in str(result).splitlines():
        print_line(console, line, _STYLES.get(line.strip()[:1], ""))
    show_page(console)


def _document(result: "PreflightResult") -> dict[str, Any]:
    return {
        "passed": result.passed,
        "explanation": result.explanation,
        "tests": [
            {"name": part.name, "passed": part.passed, "numbers": part.numbers, "explanation": part.explanation}
            for part in result.parts
        ],
        "not_run": [name for name, outcome in result.numbers.items() if outcome == "not run"],
    }
