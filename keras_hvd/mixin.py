"""The base of mixins that use attributes of the classes they are mixed into."""

from __future__ import annotations

from typing import Any

# It adds nothing. As its type is Any, type checkers accept attributes that it lacks.
Mixin: Any = object
