"""Finds for the numbers of a new optimizer state those of an old one.

Between `take_apart`, which makes records of both states, and `transfer_state`, which
puts the arrays together. Types, paths and shapes are compared, never values.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from adagc_jax.state import ClipState
from adagc_jax.transfer_partners import (
    Claims,
    Partners,
    claims_of,
    find_partners,
    in_order_of_claims,
    is_schedule,
    partner_of_clipper,
)
from adagc_jax.transfer_records import Form, Key, Record

# Field of optax.inject_hyperparams that holds settings of the optimizer, not memory.
SETTINGS = "hyperparams"
ABSENT = "not in the old state"


class Match(NamedTuple):
    """What becomes of some numbers of the new state.

    Attributes:
      record: Index of the record that they belong to.
      key: Their key in it.
      source: Index of the old record that they come from; None if they are new.
      why: Why they are new, or what to know about the source.
    """

    record: int
    key: Key
    source: int | None
    why: str = ""


class Search(NamedTuple):
    """Both sides, and what is known before single numbers are looked at.

    Attributes:
      old: Records of the old state.
      new: Records of the new state.
      partners: Of new records: the old one that corresponds as a whole.
      claims: Old numbers and the new record that takes them.
    """

    old: Sequence[Record]
    new: Sequence[Record]
    partners: Partners
    claims: Claims


def match(
    old: Sequence[Record], new: Sequence[Record], reset: Sequence[str] = ()
) -> list[Match]:
    """One `Match` for all numbers of the new state, in its order.

    Args:
      old: Records of the old state.
      new: Records of the new state.
      reset: Regular expressions: rules of clippers forget the tensors that match.
    """
    _check_reset(new, reset)
    partners = find_partners(old, new)
    search = Search(old, new, partners, claims_of(partners, old, new))
    matches: dict[int, list[Match]] = {}
    for n, record in enumerate(new):
        if record.kind is not ClipState:
            matches[n] = _match_record(search, n, _candidates(search, n))
    # A clipper's step and metrics come from where its rules come from.
    for n, (candidates, matcher) in _clippers(search, matches).items():
        matches[n] = _match_record(matcher, n, candidates)
    in_order = [m for n in range(len(new)) for m in matches[n]]
    return [_forget(new[m.record], m, reset) for m in in_order]


def _clippers(
    search: Search, matches: dict[int, list[Match]]
) -> dict[int, tuple[list[int], Search]]:
    """Of the new clippers: old ones to search, and what is known since rules are."""
    sources = {
        n: [m.source for m in found if m.source is not None]
        for n, found in matches.items()
    }
    numbers = [n for n, record in enumerate(search.new) if record.kind is ClipState]
    found = {
        n: partner_of_clipper(n, search.old, search.new, sources)
        for n in in_order_of_claims(search.new, numbers)
    }
    partners = {n: first for n, (_, first) in found.items() if first is not None}
    known = search._replace(
        partners=partners, claims=claims_of(partners, search.old, search.new)
    )
    return {n: (candidates, known) for n, (candidates, _) in found.items()}


def _candidates(search: Search, n: int) -> list[int]:
    """Old records of the same type, and the partner, which may be of another."""
    kind, partner = search.new[n].kind, search.partners.get(n)
    return [o for o, r in enumerate(search.old) if r.kind is kind or o == partner]


def _match_record(search: Search, n: int, candidates: list[int]) -> list[Match]:
    keys = search.new[n].slots
    tensors: dict[Key, Match] = {
        key: _match_tensor(search, n, key, candidates) for key in keys if len(key) > 1
    }
    learned = [m for key, m in tensors.items() if key[0] != SETTINGS]
    donors = list(dict.fromkeys(m.source for m in learned if m.source is not None))
    source, why = _owner(search, n, candidates, donors, has_tensors=bool(learned))
    own: dict[Key, Match] = {
        key: Match(n, key, source, why) for key in keys if len(key) == 1
    }
    if source is not None:
        misfits = list(_misfits(search.old[source], search.new[n], list(own)))
        if misfits:
            # One of them alone would be a count of what is no longer there.
            own = {key: Match(n, key, None, misfits[0]) for key in own}
    found = tensors | own
    return [found[key] for key in keys]


def _match_tensor(search: Search, n: int, key: Key, candidates: list[int]) -> Match:
    if key[0] == SETTINGS:
        return Match(n, key, None, "a setting of the new optimizer")
    form = search.new[n].slots[key].form
    forms = {
        o: search.old[o].slots[key].form
        for o in candidates
        if key in search.old[o].slots
    }
    fitting = [o for o in forms if forms[o] == form]
    free = [o for o in fitting if search.claims.get((o, key), n) == n]
    partner = search.partners.get(n)
    source = partner if partner in free else free[0] if len(free) == 1 else None
    if source is not None:
        search.claims[source, key] = n
        return Match(n, key, source)
    if free:
        return Match(n, key, None, _ambiguous(search, free))
    if fitting:
        return Match(n, key, None, "belongs to another part of the new state")
    if forms:
        return Match(n, key, None, _difference(next(iter(forms.values())), form))
    return Match(n, key, None, ABSENT if candidates else _absence(search, n))


def _owner(
    search: Search, n: int, candidates: list[int], donors: list[int], has_tensors: bool
) -> tuple[int | None, str]:
    """Where the numbers that belong to no tensor come from, such as a count."""
    partner = search.partners.get(n)
    if not candidates:
        return None, _absence(search, n)
    if has_tensors and not donors:
        return None, "none of its tensors was kept"
    own = {key for key in search.new[n].slots if len(key) == 1}
    # What lacks them all is not where they come from, partner or not.
    having = [o for o in donors or candidates if own & search.old[o].slots.keys()]
    eligible = having or donors or candidates
    if partner in eligible:
        others = [o for o in donors if o != partner]
        source = partner
    elif donors or len(eligible) == 1:
        source, *others = eligible
    else:
        return None, _ambiguous(search, eligible)
    titles = ", ".join(search.old[o].title for o in others)
    return source, f"others of its tensors come from {titles}" if others else ""


def _misfits(old: Record, new: Record, keys: list[Key]) -> Iterator[str]:
    for key in keys:
        if key not in old.slots:
            yield f"{key[0]} is {ABSENT}"
        elif old.slots[key].form != new.slots[key].form:
            what = _difference(old.slots[key].form, new.slots[key].form)
            yield f"{key[0]}: {what}"


def _difference(old: Form, new: Form) -> str:
    for name in ("shape", "dtype"):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            return f"{name} was {was}, is {now}"
    return "its groups were others"


def _absence(search: Search, n: int) -> str:
    """Why there is nothing that a record's numbers could come from."""
    record = search.new[n]
    if record.kind is ClipState and any(o.kind is ClipState for o in search.old):
        return "none of its rules was kept"
    return f"{ABSENT}: the schedule starts at 0" if is_schedule(record) else ABSENT


def _ambiguous(search: Search, candidates: list[int]) -> str:
    titles = ", ".join(search.old[o].title for o in candidates)
    return f"ambiguous: fits {titles}"


def _check_reset(new: Sequence[Record], reset: Sequence[str]) -> None:
    if isinstance(reset, str):
        raise ValueError(f"reset must be a sequence of patterns, got {reset!r}.")
    rules = [record for record in new if record.clipper is not None]
    if reset and not rules:
        raise ValueError(
            f"reset is {reset!r}, but the new optimizer has no clipper: leave it out."
        )
    paths = list(dict.fromkeys(_tensor(key) for r in rules for key in r.slots))
    for pattern in reset:
        if paths and not any(_finds(pattern, path) for path in paths):
            shown = ", ".join(path or "'' (the whole tree)" for path in paths[:5])
            raise ValueError(
                f"reset: the pattern {pattern!r} matches no tensor. Patterns are "
                f"regular expressions searched in paths such as {shown}"
                f"{', ...' if len(paths) > 5 else ''}."
            )


def _finds(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except (re.error, TypeError) as error:
        raise ValueError(
            f"reset: {pattern!r} is no regular expression, {error}. Escape what is "
            "meant literally, as re.escape does."
        ) from error


def _forget(record: Record, found: Match, reset: Sequence[str]) -> Match:
    is_rule = record.clipper is not None and found.source is not None
    if is_rule and any(re.search(pattern, _tensor(found.key)) for pattern in reset):
        return found._replace(source=None, why="reset")
    return found


def _tensor(key: Key) -> str:
    return "/".join(key[1:])
