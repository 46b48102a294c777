"""Tiles that programs of one launch add up in memory, in a fixed order: who added what, for tests of kernels that do so."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class TileSums:
    """What the programs of a kernel have done, run one behind the other: numbers in memory by their place, the programs that
    have added to a tile (the first one stores it), and those that have read it, with whether it counted."""

    begun: int = 0
    numbers: dict[int, int] = field(default_factory=dict)
    added: dict[int, list[int]] = field(default_factory=dict)
    read: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)

    def ticket(self) -> int:
        self.begun += 1
        return self.begun - 1

    def await_number(self, place: int, number: int) -> bool:
        """Whether the number is there: of a program that has not run, nobody would ever say so."""
        return self.numbers.get(place, 0) >= number

    def publish(self, place: int, number: int) -> None:
        assert self.numbers.get(place, 0) < number, "a number goes back"
        self.numbers[place] = number

    def put(self, row: int, program: int) -> None:
        assert row not in self.added, "what was added before is lost"
        self.added[row] = [program]

    def add(self, row: int, program: int) -> None:
        assert row in self.added, "nobody has stored the first part"
        self.added[row].append(program)

    def reads(self, row: int, program: int, there: bool) -> None:
        self.read.setdefault(row, []).append((program, there))
