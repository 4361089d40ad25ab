"""The words that schemas are made of."""

from __future__ import annotations

from dataclasses import dataclass

Named = tuple[tuple[str, str], ...]
"""(table, what one of its rows is called)."""
Labels = tuple[tuple[str, tuple[str, ...]], ...]
Numbers = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Options for the names of one field of life."""

    parents: Named
    labels: Labels
    numbers: Numbers
    maybe: tuple[str, ...] = ("phone", "email", "nickname", "badge")
    children: Named
    child_labels: Labels
    child_numbers: Numbers
    grands: Named
    grand_numbers: Numbers


_PEOPLE = (
    "Ada Ali Amy Ana Ben Bea Cal Cleo Dan Dora Eli Elsa Emil Eva Finn Fay Gus Gina Hal Hana Ida Igor Ines Ivo Jan "
    "Jill Kai Kim Lars Lena Leo Lia Max Mia Milo Mona Ned Nina Noa Olga Omar Otto Pam Paul Pia Raj Rita Rob Rosa "
    "Sam Sara Sven Tara Ted Tess Theo Tina Tom Uma Ute Vera Vic Wes Will Yara Yuri Zara Zoe"
)
PEOPLE = tuple(_PEOPLE.split())
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Delhi", "Kyoto", "Quito", "Accra")
COUNTRIES = ("Peru", "Chad", "Fiji", "Iran", "Laos", "Mali", "Oman", "Togo")
COLOURS = ("red", "blue", "green", "white", "black", "grey")

DOMAINS = (
    Domain(
        parents=(("customers", "customer"), ("clients", "client"), ("buyers", "buyer")),
        labels=(("city", CITIES), ("country", COUNTRIES), ("tier", ("gold", "silver", "bronze", "basic", "trial"))),
        numbers=(("age", 18, 80), ("points", 0, 500), ("discount", 0, 40)),
        children=(("orders", "order"), ("purchases", "purchase")),
        child_labels=(("status", ("open", "paid", "sent", "returned")), ("channel", ("web", "shop", "phone", "fair"))),
        child_numbers=(("total", 10, 400), ("weight", 1, 90)),
        grands=(("items", "item"), ("parcels", "parcel")),
        grand_numbers=(("quantity", 1, 9), ("price", 1, 60)),
    ),
    Domain(
        parents=(("students", "student"), ("pupils", "pupil"), ("learners", "learner")),
        labels=(("town", CITIES), ("house", COLOURS), ("major", ("maths", "art", "law", "music", "history"))),
        numbers=(("year", 1, 9), ("credits", 0, 180), ("height", 120, 200)),
        children=(("exams", "exam"), ("essays", "essay"), ("courses", "course")),
        child_labels=(("subject", ("physics", "latin", "sport", "drama")), ("grade", ("A", "B", "C", "D"))),
        child_numbers=(("score", 0, 100), ("pages", 1, 60)),
        grands=(("answers", "answer"), ("remarks", "remark")),
        grand_numbers=(("marks", 0, 20), ("length", 1, 300)),
    ),
    Domain(
        parents=(("patients", "patient"), ("visitors", "visitor")),
        labels=(("ward", ("north", "south", "east", "west", "main")), ("blood", ("A+", "B+", "O+", "AB", "O-"))),
        numbers=(("age", 1, 95), ("weight", 10, 120), ("pulse", 45, 140)),
        children=(("visits", "visit"), ("checkups", "checkup")),
        child_labels=(("reason", ("cough", "fever", "injury", "control")), ("room", ("r1", "r2", "r3", "r4"))),
        child_numbers=(("cost", 20, 900), ("minutes", 5, 120)),
        grands=(("tests", "test"), ("doses", "dose")),
        grand_numbers=(("amount", 1, 50), ("value", 1, 200)),
    ),
    Domain(
        parents=(("pilots", "pilot"), ("captains", "captain"), ("drivers", "driver")),
        labels=(("base", CITIES), ("rank", ("junior", "senior", "chief", "reserve", "cadet"))),
        numbers=(("hours", 0, 900), ("age", 21, 65), ("licence", 100, 400)),
        children=(("trips", "trip"), ("routes", "route")),
        child_labels=(("goal", COUNTRIES[:4]), ("state", ("planned", "done", "late", "cancelled"))),
        child_numbers=(("distance", 50, 900), ("fuel", 5, 80)),
        grands=(("stops", "stop"), ("tolls", "toll")),
        grand_numbers=(("delay", 0, 40), ("fee", 1, 30)),
    ),
    Domain(
        parents=(("artists", "artist"), ("singers", "singer"), ("authors", "author")),
        labels=(("genre", ("folk", "jazz", "rock", "opera", "blues")), ("land", COUNTRIES)),
        numbers=(("fans", 0, 800), ("debut", 1960, 2020), ("prizes", 0, 12)),
        children=(("works", "work"), ("records", "record")),
        child_labels=(("format", ("print", "disc", "tape", "file")), ("mood", ("calm", "happy", "dark", "wild"))),
        child_numbers=(("sales", 0, 700), ("length", 1, 90)),
        grands=(("reviews", "review"), ("prints", "print")),
        grand_numbers=(("stars", 1, 5), ("copies", 1, 300)),
    ),
    Domain(
        parents=(("workers", "worker"), ("staff", "colleague"), ("agents", "agent")),
        labels=(("office", CITIES), ("role", ("cook", "clerk", "guard", "nurse", "tester")), ("team", COLOURS)),
        numbers=(("salary", 100, 900), ("leave", 0, 30), ("floor", 1, 12)),
        children=(("shifts", "shift"), ("tasks", "task"), ("calls", "call")),
        child_labels=(("kind", ("day", "night", "extra", "training")), ("place", ("hall", "yard", "gate", "desk"))),
        child_numbers=(("hours", 1, 12), ("bonus", 0, 99)),
        grands=(("breaks", "break"), ("notes", "note")),
        grand_numbers=(("minutes", 1, 45), ("words", 1, 200)),
    ),
    Domain(
        parents=(("farmers", "farmer"), ("growers", "grower")),
        labels=(
            ("valley", ("upper", "lower", "dry", "green", "long")),
            ("crop", ("rye", "corn", "rice", "oats", "beans")),
        ),
        numbers=(("acres", 1, 300), ("barns", 0, 9), ("cows", 0, 60)),
        children=(("harvests", "harvest"), ("deliveries", "delivery")),
        child_labels=(("quality", ("top", "good", "fair", "poor")), ("store", ("silo", "shed", "cellar", "port"))),
        child_numbers=(("tons", 1, 80), ("price", 50, 400)),
        grands=(("loads", "load"), ("sacks", "sack")),
        grand_numbers=(("kilos", 1, 90), ("crates", 1, 40)),
    ),
    Domain(
        parents=(("players", "player"), ("runners", "runner"), ("rowers", "rower")),
        labels=(("club", ("Lions", "Bears", "Hawks", "Otters", "Foxes")), ("nation", COUNTRIES)),
        numbers=(("rating", 800, 2400), ("age", 15, 50), ("medals", 0, 15)),
        children=(("games", "game"), ("races", "race"), ("matches", "match")),
        child_labels=(("result", ("won", "lost", "drawn", "void")), ("surface", ("grass", "clay", "ice", "sand"))),
        child_numbers=(("points", 0, 60), ("seconds", 50, 400)),
        grands=(("rounds", "round"), ("laps", "lap")),
        grand_numbers=(("faults", 0, 9), ("tempo", 10, 99)),
    ),
)
