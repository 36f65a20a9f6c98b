"""Pairs the named tuples of an old state with those of a new one, each as a whole.

Between `take_apart`, which makes records of both states, and `match`, which looks at
single numbers. A partner is where a record's numbers are sought first.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from adagc_jax.state import ClipState, StageState
from adagc_jax.transfer_records import Key, Record

Partners = dict[int, int]  # of new records: the old one that corresponds
Claims = dict[tuple[int, Key], int]  # old numbers, and the new record that takes them

# States of schedules in optax: a bare one, and one in inject_hyperparams, by their
# names because the second is not public.
_SCHEDULES = ("ScaleByScheduleState", "WrappedScheduleState")


def find_partners(old: Sequence[Record], new: Sequence[Record]) -> Partners:
    """Partners of all new records but clippers, which follow their rules.

    Of the records of a type, those are paired that hold the same numbers at the same
    site, then those alone at their site, then those that hold the same numbers
    elsewhere, then what is left; each time in their order, if there are as many in both
    states.
    """
    partners: Partners = {}
    for kind in dict.fromkeys(record.kind for record in new):
        if kind is not ClipState:
            olds, news = (
                [i for i, record in enumerate(side) if record.kind is kind]
                for side in (old, new)
            )
            partners |= _pair(old, new, olds, news)
    return partners | _pair_schedules(old, new, partners)


def partner_of_clipper(
    n: int,
    old: Sequence[Record],
    new: Sequence[Record],
    sources: dict[int, list[int]],
) -> tuple[list[int], int | None]:
    """Old clippers that the rules of the new clipper ``n`` come from, the first of all.

    Args:
      n: Index of the new clipper.
      old: Records of the old state.
      new: Records of the new state.
      sources: For the new rules: the old record of each number that was found.

    Returns:
      All candidates, and the one with most of the numbers, or None.
    """
    rules = [m for m, record in enumerate(new) if record.clipper == new[n].path]
    with_memory = [m for m in rules if new[m].kind is not StageState]
    origins = Counter(old[o].clipper for m in with_memory or rules for o in sources[m])
    clippers = {r.path: o for o, r in enumerate(old) if r.kind is ClipState}
    ranked = [clippers[path] for path, _ in origins.most_common() if path is not None]
    return sorted(ranked), ranked[0] if ranked else None


def claims_of(
    partners: Partners, old: Sequence[Record], new: Sequence[Record]
) -> Claims:
    """Partners have a right to each other's numbers, whoever else could use them."""
    claims: Claims = {}
    for n, o in partners.items():
        for key in new[n].slots.keys() & old[o].slots.keys():
            claims.setdefault((o, key), n)
    return claims


def in_order_of_claims(new: Sequence[Record], numbers: Iterable[int]) -> list[int]:
    """Clippers with rules that remember come first: the metrics are rather theirs."""
    remembering = {r.clipper for r in new if r.kind is not StageState}
    return sorted(numbers, key=lambda n: new[n].path not in remembering)


def _pair(
    old: Sequence[Record], new: Sequence[Record], olds: list[int], news: list[int]
) -> Partners:
    partners: Partners = {}

    def pair(trait: Callable[[Record], Hashable], *, alone: bool = False) -> None:
        """Pairs records alike in a trait, if there are as many on both sides."""
        taken = set(partners.values())
        theirs = _by_trait(trait, old, [o for o in olds if o not in taken])
        ours = _by_trait(trait, new, [n for n in news if n not in partners])
        for value, alike in ours.items():
            others = theirs.get(value, [])
            if len(alike) == len(others) and not (alone and len(alike) > 1):
                partners.update(zip(alike, others, strict=True))

    pair(lambda record: (record.site, _numbers(record)))
    pair(lambda record: record.site, alone=True)
    pair(_numbers)
    pair(lambda record: None)
    return partners


def _by_trait(
    trait: Callable[[Record], Hashable], side: Sequence[Record], numbers: list[int]
) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for number in numbers:
        found.setdefault(trait(side[number]), []).append(number)
    return found


def _numbers(record: Record) -> Hashable:
    return frozenset((key, slot.form) for key, slot in record.slots.items())


def _pair_schedules(
    old: Sequence[Record], new: Sequence[Record], partners: Partners
) -> Partners:
    """Counts of schedules that go into ``inject_hyperparams``, or come out of it."""
    news = [n for n, r in enumerate(new) if is_schedule(r) and n not in partners]
    taken = set(partners.values())
    olds = [o for o, r in enumerate(old) if is_schedule(r) and o not in taken]
    # One schedule may have become several: all of them count the same steps.
    olds = olds * len(news) if len(olds) == 1 else olds
    return dict(zip(news, olds, strict=True)) if len(olds) == len(news) else {}


def is_schedule(record: Record) -> bool:
    """Whether a record is the step of a schedule of Optax."""
    kind = record.kind
    return kind.__name__ in _SCHEDULES and kind.__module__.startswith("optax.")
