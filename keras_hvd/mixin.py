"""What classes extend that are mixed into others, and use what those have."""

from __future__ import annotations

from typing import Any

# It adds nothing. Type checkers take what it lacks for something of the other class.
Mixin: Any = object
