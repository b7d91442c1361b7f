"""Retention policies: levels with their rules, as text and as JSON. Pure; see ``retention``.

As JSON a policy is ``{"full": ["last 3"], "weights": ["best 5 val_loss", "every 1000 steps"],
"record": ["all"]}``: levels to lists of rules in the grammar of
:mod:`ckptstore.catalog.retention_rules`.
Two more keys are about how tensors are written. ``"lossy": ["bf16:rel_l2=0.004",
"int8:rel_l2=0.02,block=64"]`` bounds what the levels ``weights-bf16`` and ``weights-int8`` may
lose; ``"encodings": {"role:optimizer": "dynamic8"}`` holds for the saves of the run. Both are texts
of :class:`ckptstore.Encoding`. ``"roles": {"mpd.*": "weights"}`` fixes roles of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_args

from ckptstore import limits
from ckptstore.catalog.levels import Level
from ckptstore.catalog.retention_rules import RULES_HINT, Rule, parse_rules
from ckptstore.encodings.encoding import Encoding
from ckptstore.encodings.encoding_rules import EncodingRules, Encodings
from ckptstore.errors import InvalidInputError, PolicyError
from ckptstore.format.names import entries_of
from ckptstore.format.roles import RoleRules
from ckptstore.shown import shown

_FIELDS: Final[dict[Level, str]] = {level: level.replace("-", "_") for level in get_args(Level)}
"""Level to the field that holds its rules, from the most that is kept to the least."""
_ROUNDINGS: Final = ("bf16", "int8")
"""Encodings that levels have, from the most that is kept to the least."""

Rules: TypeAlias = "str | Sequence[str]"
"""Rules as a user writes them: one text, or several; commas separate rules in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A retention policy: each version stays at the highest level that has a rule for it.

    Made with :meth:`parse` or :meth:`from_json`.
    """

    full: tuple[Rule, ...] = ()
    """Everything is kept."""
    weights: tuple[Rule, ...] = ()
    """The tensors of role ``weights`` are kept."""
    weights_bf16: tuple[Rule, ...] = ()
    """They are kept in bfloat16: level ``weights-bf16``."""
    weights_int8: tuple[Rule, ...] = ()
    """They are kept in integers of 8 bits with a scale a block: level ``weights-int8``."""
    record: tuple[Rule, ...] = ()
    """The catalog's record is kept: metrics, tags, lineage; no tensors."""
    lossy: tuple[Encoding, ...] = ()
    """How far the levels ``weights-bf16`` and ``weights-int8`` may go; at most one of each name."""
    encodings: Mapping[str, str] = field(default_factory=dict)
    """Pattern, or ``role:ROLE``, to what such tensors are saved in; the first match wins."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Pattern to the role of such tensors, in versions to come and in those that are there."""

    @classmethod
    def parse(
        cls,
        *,
        full: Rules = (),
        weights: Rules = (),
        weights_bf16: Rules = (),
        weights_int8: Rules = (),
        record: Rules = (),
        lossy: str | Sequence[str] = (),
        encodings: Encodings | None = None,
        roles: object = None,
    ) -> Policy:
        """Return the policy of rules in text form.

        Raises
        ------
        InvalidInputError
            A rule or an encoding does not follow the grammar; the message has the position of a
            rule, from 1.
        PolicyError
            There is no rule at all, and no encoding.
        """
        policy = cls(
            full=_rules(full),
            weights=_rules(weights),
            weights_bf16=_rules(weights_bf16),
            weights_int8=_rules(weights_int8),
            record=_rules(record),
            lossy=_lossy([lossy] if isinstance(lossy, str) else lossy),
            encodings=_encodings(encodings),
            roles=_roles({} if roles is None else roles),
        )
        if not policy.encodings and roles is None:
            policy.check()
        return policy

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> Policy:
        """Return the policy of its JSON form.

        Raises
        ------
        InvalidInputError
            It has other keys than these, or a rule or an encoding does not follow the grammar.
        PolicyError
            There is no rule at all, and no encoding.
        """
        value = entries_of(value, "the policy")
        unknown = sorted(map(str, value.keys() - _FIELDS.keys() - {"lossy", "encodings", "roles"}))
        if unknown:
            msg = f"a policy has no {unknown[0]!r}"
            hint = "its keys are " + ", ".join(_FIELDS) + ", lossy, encodings and roles"
            raise InvalidInputError(msg, hint=hint)
        levels = {name: key for key, name in _FIELDS.items() if key in value}
        return cls.parse(
            **{name: _texts(key, value[key], RULES_HINT) for name, key in levels.items()},
            lossy=_texts("lossy", value.get("lossy", ()), "such as int8:rel_l2=0.02"),
            encodings=value.get("encodings"),
            roles=value.get("roles"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, without empty entries."""
        found: dict[str, Any] = {
            key: [str(rule) for rule in rules]
            for key, name in _FIELDS.items()
            if (rules := getattr(self, name))
        }
        if self.lossy:
            found["lossy"] = [str(encoding) for encoding in self.lossy]
        maps = {"encodings": self.encodings, "roles": self.roles}
        return found | {key: dict(value) for key, value in maps.items() if value}

    def __str__(self) -> str:
        """Return the policy in one line."""
        found = self.to_json()
        for name in ("encodings", "roles"):
            if name in found:
                found[name] = [f"{key}={value}" for key, value in found[name].items()]
        return "; ".join(f"{key}: {', '.join(texts)}" for key, texts in found.items())

    def rules(self, level: Level) -> tuple[Rule, ...]:
        """Return the rules of one level."""
        found: tuple[Rule, ...] = getattr(self, _FIELDS[level])
        return found

    @property
    def has_rules(self) -> bool:
        """Whether it has rules, and not encodings alone."""
        return any(getattr(self, name) for name in _FIELDS.values())

    def rounding(self, level: Level) -> tuple[Encoding, ...]:
        """Return the encodings of the weights at a level: see :func:`rounding_of`."""
        return rounding_of(level, self.lossy)

    def check(self) -> None:
        """Raise PolicyError if there is no rule: to carry it out would delete everything.

        A stored policy may have encodings alone: it then decides nothing.
        """
        if not self.has_rules:
            raise PolicyError("a policy without rules would delete everything", hint=RULES_HINT)


def rounding_of(level: Level, lossy: Iterable[Encoding | str]) -> tuple[Encoding, ...]:
    """Return the encodings that round the weights at a level; none for other levels.

    A tensor that the first one does not hold within its bounds gets the next one: that of the
    level above.

    Parameters
    ----------
    lossy
        With bounds, as in :attr:`Policy.lossy`.

    Raises
    ------
    InvalidInputError
        One is not for ageing, or is there twice.
    """
    bounded = {one.name: one for one in _lossy(list(lossy))}
    name = level.removeprefix("weights-")
    if name == level:
        return ()
    names = _ROUNDINGS[: _ROUNDINGS.index(name) + 1]
    return tuple(bounded.get(one, Encoding(one)) for one in reversed(names))


def _texts(key: str, value: object, hint: str) -> list[str]:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
        msg = f"{key}: {value!r} is neither a text nor a list of texts"
        raise InvalidInputError(msg, hint=hint)
    return list(listed)


def _lossy(listed: Sequence[Encoding | str]) -> tuple[Encoding, ...]:
    found: dict[str, Encoding] = {}
    for text in listed:
        encoding = Encoding.of(text)
        if encoding.name not in _ROUNDINGS or encoding.name in found:
            said = "to be there twice" if encoding.name in found else "for ageing"
            msg = f"lossy: {str(text)!r}: {encoding.name} is not {said}"
            raise InvalidInputError(msg, hint="one of each of " + " and ".join(_ROUNDINGS))
        found[encoding.name] = encoding
    return tuple(found.values())


def _encodings(wanted: object) -> dict[str, str]:
    found = EncodingRules(wanted).to_json()  # type: ignore[arg-type]  # it checks what it is
    if len(found) > limits.POLICY_RULES_MAX:
        raise InvalidInputError(f"{len(found)} encodings are more than {limits.POLICY_RULES_MAX}")
    return found


def _roles(wanted: object) -> dict[str, str]:
    found = entries_of(wanted, "roles")
    if not all(type(pattern) is str for pattern in found) or len(found) > limits.POLICY_RULES_MAX:
        msg = f"roles map at most {limits.POLICY_RULES_MAX} texts to roles, not {shown(wanted)}"
        raise InvalidInputError(msg, hint="such as roles={'mpd.*': 'weights'}")
    RoleRules(found)
    return found


def _rules(texts: Rules) -> tuple[Rule, ...]:
    listed = [texts] if isinstance(texts, str) else texts
    found = dict.fromkeys(rule for text in listed for rule in parse_rules(text))
    if len(found) > limits.POLICY_RULES_MAX:
        raise InvalidInputError(f"{len(found)} rules are more than {limits.POLICY_RULES_MAX}")
    return tuple(found)
