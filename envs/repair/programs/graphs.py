"""Reference programs: graphs and grids."""

from __future__ import annotations

import random

from ..program import Probe, Program, call


def _graph(rng: random.Random, *, directed: bool = True, size: int = 6) -> dict[str, list[str]]:
    nodes = "abcdef"[: rng.randint(1, size)]
    graph: dict[str, list[str]] = {node: [] for node in nodes}
    for _ in range(rng.randint(0, 2 * len(nodes))):
        a, b = rng.choice(nodes), rng.choice(nodes)
        if a != b and b not in graph[a]:
            graph[a].append(b)
            if not directed:
                graph[b].append(a)
    return {node: sorted(others) for node, others in graph.items()}


def _hops(rng: random.Random) -> Probe:
    graph = _graph(rng)
    return call("path", graph, rng.choice(list(graph)), rng.choice(list(graph)))


HOPS = Program(
    name="hops",
    kind="graphs",
    source='''\
def path(graph, start, goal):
    """A path with the fewest steps from start to goal, both included, as a list; [] when there is none.

    `graph` gives the neighbours of each node, in order; of equally short paths, the one is meant that a breadth first
    search in this order finds first.
    """
    came_from = {start: None}
    queue = [start]
    while queue:
        node = queue.pop(0)
        if node == goal:
            found = []
            while node is not None:
                found.insert(0, node)
                node = came_from[node]
            return found
        for neighbour in graph[node]:
            if neighbour not in came_from:
                came_from[neighbour] = node
                queue.append(neighbour)
    return []
''',
    edges=(
        call("path", {"a": []}, "a", "a"),
        call("path", {"a": [], "b": ["a"]}, "a", "b"),
        call("path", {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}, "a", "d"),
        call("path", {"a": ["b"], "b": ["a", "c"], "c": ["d"], "d": ["a"]}, "a", "d"),
        call("path", {"a": ["b", "d"], "b": ["c"], "c": ["e"], "d": ["e"], "e": []}, "a", "e"),
    ),
    draw=_hops,
)


def _roads(rng: random.Random) -> Probe:
    graph = {a: {b: rng.randint(1, 9) for b in others} for a, others in _graph(rng).items()}
    return call("distances", graph, rng.choice(list(graph)))


ROADS = Program(
    name="roads",
    kind="graphs",
    source='''\
import heapq


def distances(roads, start):
    """The length of the shortest way from start to every place that can be reached, start included with 0.

    roads == {"a": {"b": 3}, "b": {}} means one road of length 3 from a to b, and none back.
    """
    known = {}
    heap = [(0, start)]
    while heap:
        length, place = heapq.heappop(heap)
        if place in known:
            continue
        known[place] = length
        for neighbour, road in roads[place].items():
            heapq.heappush(heap, (length + road, neighbour))
    return known
''',
    edges=(
        call("distances", {"a": {}}, "a"),
        call("distances", {"a": {"b": 3}, "b": {}}, "a"),
        call("distances", {"a": {"b": 9, "c": 2}, "b": {}, "c": {"b": 3}}, "a"),
        call("distances", {"a": {"b": 1}, "b": {"a": 1}, "c": {"a": 1}}, "a"),
    ),
    draw=_roads,
)

ORDERING = Program(
    name="ordering",
    kind="graphs",
    source='''\
def order(needs):
    """An order of tasks in which each comes after all that it needs; ValueError when they need each other in a circle.

    `needs` gives for each task the tasks it needs. Of the tasks that could come next, always the first in the alphabet.
    """
    waiting = {task: set(before) for task, before in needs.items()}
    done = []
    while waiting:
        ready = [task for task, before in waiting.items() if not before]
        if not ready:
            raise ValueError("a circle")
        task = min(ready)
        done.append(task)
        del waiting[task]
        for before in waiting.values():
            before.discard(task)
    return done
''',
    edges=(
        call("order", {}),
        call("order", {"a": ["b"], "b": []}),
        call("order", {"a": ["b"], "b": ["a"]}),
        call("order", {"c": [], "b": [], "a": ["c"]}),
        call("order", {"d": ["a"], "a": [], "c": ["d"], "b": ["d"]}),
    ),
    draw=lambda rng: call("order", _graph(rng, size=5)),
)

ISLANDS = Program(
    name="islands",
    kind="graphs",
    source='''\
def islands(friends):
    """Groups of people who know each other directly or through others.

    `friends` gives the friends of each; friendship is mutual. A group is a sorted list, and groups are sorted by their
    first name.
    """
    groups = []
    seen = set()
    for person in sorted(friends):
        if person in seen:
            continue
        group, todo = [], [person]
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            group.append(one)
            todo.extend(friends[one])
        groups.append(sorted(group))
    return groups
''',
    edges=(
        call("islands", {}),
        call("islands", {"b": [], "a": []}),
        call("islands", {"a": ["c"], "b": [], "c": ["a", "d"], "d": ["c"]}),
        call("islands", {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}),
    ),
    draw=lambda rng: call("islands", _graph(rng, directed=False)),
)


def _grid(rng: random.Random) -> Probe:
    rows, columns = rng.randint(1, 5), rng.randint(1, 5)
    grid = ["".join(rng.choices(".#", weights=[3, 2], k=columns)) for _ in range(rows)]
    return call("area", grid, rng.randrange(rows), rng.randrange(columns))


FLOOD = Program(
    name="flood",
    kind="graphs",
    source='''\
def area(grid, row, column):
    """How many free fields "." can be reached from one, itself included, by steps up, down, left and right.

    0 when the first field is a wall "#". All rows of the grid have the same length.
    """
    todo = [(row, column)]
    seen = set()
    while todo:
        y, x = todo.pop()
        if not (0 <= y < len(grid) and 0 <= x < len(grid[0])):
            continue
        if grid[y][x] == "#" or (y, x) in seen:
            continue
        seen.add((y, x))
        todo += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
    return len(seen)
''',
    edges=(
        call("area", ["."], 0, 0),
        call("area", ["#."], 0, 0),
        call("area", [".#.", "...", "#.#"], 0, 0),
        call("area", ["..", "..", ".."], 2, 1),
        call("area", [".#", "#."], 0, 0),
        call("area", ["...", "##.", "..."], 2, 0),
        call("area", ["...."], 0, 3),
    ),
    draw=_grid,
)

TEAMS = Program(
    name="teams",
    kind="graphs",
    source='''\
def teams(rivals):
    """Put everyone into team 0 or 1 so that no two rivals are in one team: {name: team}, or {} when it cannot be done.

    `rivals` gives the rivals of each; rivalry is mutual. The first in the alphabet of each connected part is in team 0.
    """
    team = {}
    for first in sorted(rivals):
        if first in team:
            continue
        team[first] = 0
        todo = [first]
        while todo:
            one = todo.pop()
            for rival in rivals[one]:
                if rival not in team:
                    team[rival] = 1 - team[one]
                    todo.append(rival)
                elif team[rival] == team[one]:
                    return {}
    return team
''',
    edges=(
        call("teams", {}),
        call("teams", {"b": [], "a": []}),
        call("teams", {"a": ["b"], "b": ["a", "c"], "c": ["b"]}),
        call("teams", {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}),
        call("teams", {"a": ["d"], "d": ["a"], "b": ["c"], "c": ["b"]}),
    ),
    draw=lambda rng: call("teams", _graph(rng, directed=False, size=5)),
)


def _tree(rng: random.Random) -> Probe:
    names = "abcdefg"[: rng.randint(1, 7)]
    boss = {name: rng.choice(names[:i]) if i and rng.random() < 0.85 else "" for i, name in enumerate(names)}
    if rng.random() < 0.5:
        return call("common", boss, rng.choice(names), rng.choice(names))
    return call("depths", boss)


BOSSES = Program(
    name="bosses",
    kind="graphs",
    source='''\
def chain(boss, name):
    """A person, their boss, that one's boss and so on to the top; `boss` gives "" for those at the top."""
    found = [name]
    while boss[found[-1]]:
        found.append(boss[found[-1]])
    return found


def common(boss, a, b):
    """The nearest boss that two people have in common ("" when there is none); everyone is their own boss here."""
    above = chain(boss, b)
    for name in chain(boss, a):
        if name in above:
            return name
    return ""


def depths(boss):
    """For each level, from the top, how many people are on it: [1, 3] is one person and three right below."""
    counts = []
    for name in boss:
        depth = len(chain(boss, name)) - 1
        counts += [0] * (depth + 1 - len(counts))
        counts[depth] += 1
    return counts
''',
    edges=(
        call("chain", {"a": "", "b": "a", "c": "b"}, "c"),
        call("common", {"a": "", "b": "a", "c": "a"}, "b", "c"),
        call("common", {"a": "", "b": "a", "c": "b"}, "b", "c"),
        call("common", {"a": "", "b": ""}, "a", "b"),
        call("depths", {}),
        call("depths", {"a": "", "b": "a", "c": "a", "d": "c"}),
        call("depths", {"d": "c", "c": "a", "a": ""}),
    ),
    draw=_tree,
)

PROGRAMS = (HOPS, ROADS, ORDERING, ISLANDS, FLOOD, TEAMS, BOSSES)
