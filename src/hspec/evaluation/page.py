"""Pages of HTML that need nothing but themselves, from the package's templates."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Fill in a template of ``hspec/assets``; what it names must be given, and is escaped."""
    environment = Environment(
        loader=PackageLoader("hspec", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
