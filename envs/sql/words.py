"""The words that schemas are made of."""

from __future__ import annotations

from dataclasses import dataclass

Named = tuple[tuple[str, str], ...]
"""(table, name of one of its rows)."""
Labels = tuple[tuple[str, tuple[str, ...]], ...]
Numbers = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Options for the names of one subject area."""

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
        numbers=(("balance", 20, 800), ("credit", 0, 500), ("discount", 4, 40)),
        children=(("orders", "order"), ("purchases", "purchase")),
        child_labels=(("status", ("open", "paid", "sent", "returned")), ("channel", ("web", "shop", "phone", "fair"))),
        child_numbers=(("total", 10, 400), ("weight", 8, 90)),
        grands=(("items", "item"), ("parcels", "parcel")),
        grand_numbers=(("width", 4, 90), ("price", 8, 60)),
    ),
    Domain(
        parents=(("students", "student"), ("pupils", "pupil"), ("learners", "learner")),
        labels=(("town", CITIES), ("house", COLOURS), ("major", ("maths", "art", "law", "music", "history"))),
        numbers=(("fees", 40, 900), ("average", 10, 100), ("height", 120, 200)),
        children=(("exams", "exam"), ("essays", "essay"), ("courses", "course")),
        child_labels=(("subject", ("physics", "latin", "sport", "drama")), ("grade", ("A", "B", "C", "D"))),
        child_numbers=(("score", 10, 100), ("hours", 4, 60)),
        grands=(("answers", "answer"), ("remarks", "remark")),
        grand_numbers=(("marks", 8, 40), ("length", 10, 300)),
    ),
    Domain(
        parents=(("patients", "patient"), ("visitors", "visitor")),
        labels=(("ward", ("north", "south", "east", "west", "main")), ("blood", ("A+", "B+", "O+", "AB", "O-"))),
        numbers=(("height", 50, 210), ("weight", 10, 120), ("pulse", 45, 140)),
        children=(("visits", "visit"), ("checkups", "checkup")),
        child_labels=(("reason", ("cough", "fever", "injury", "control")), ("room", ("r1", "r2", "r3", "r4"))),
        child_numbers=(("cost", 20, 900), ("minutes", 8, 120)),
        grands=(("tests", "test"), ("doses", "dose")),
        grand_numbers=(("amount", 8, 50), ("value", 8, 200)),
    ),
    Domain(
        parents=(("pilots", "pilot"), ("captains", "captain"), ("drivers", "driver")),
        labels=(("base", CITIES), ("rank", ("junior", "senior", "chief", "reserve", "cadet"))),
        numbers=(("hours", 10, 900), ("pay", 20, 90), ("range", 100, 400)),
        children=(("trips", "trip"), ("routes", "route")),
        child_labels=(("goal", COUNTRIES[:4]), ("state", ("planned", "done", "late", "cancelled"))),
        child_numbers=(("distance", 50, 900), ("fuel", 5, 80)),
        grands=(("stops", "stop"), ("tolls", "toll")),
        grand_numbers=(("delay", 8, 60), ("fee", 8, 50)),
    ),
    Domain(
        parents=(("artists", "artist"), ("singers", "singer"), ("authors", "author")),
        labels=(("genre", ("folk", "jazz", "rock", "opera", "blues")), ("land", COUNTRIES)),
        numbers=(("income", 10, 800), ("royalty", 8, 60), ("rating", 10, 99)),
        children=(("works", "work"), ("records", "record")),
        child_labels=(("format", ("print", "disc", "tape", "file")), ("mood", ("calm", "happy", "dark", "wild"))),
        child_numbers=(("sales", 10, 700), ("length", 8, 90)),
        grands=(("reviews", "review"), ("prints", "print")),
        grand_numbers=(("weight", 8, 50), ("price", 8, 300)),
    ),
    Domain(
        parents=(("workers", "worker"), ("staff", "colleague"), ("agents", "agent")),
        labels=(("office", CITIES), ("role", ("cook", "clerk", "guard", "nurse", "tester")), ("team", COLOURS)),
        numbers=(("salary", 100, 900), ("overtime", 8, 40), ("rent", 40, 300)),
        children=(("shifts", "shift"), ("tasks", "task"), ("calls", "call")),
        child_labels=(("kind", ("day", "night", "extra", "training")), ("place", ("hall", "yard", "gate", "desk"))),
        child_numbers=(("hours", 8, 40), ("bonus", 8, 99)),
        grands=(("breaks", "break"), ("notes", "note")),
        grand_numbers=(("minutes", 8, 45), ("noise", 8, 90)),
    ),
    Domain(
        parents=(("farmers", "farmer"), ("growers", "grower")),
        labels=(
            ("valley", ("upper", "lower", "dry", "green", "long")),
            ("crop", ("rye", "corn", "rice", "oats", "beans")),
        ),
        numbers=(("acres", 10, 300), ("rainfall", 20, 90), ("debt", 10, 600)),
        children=(("harvests", "harvest"), ("deliveries", "delivery")),
        child_labels=(("quality", ("top", "good", "fair", "poor")), ("store", ("silo", "shed", "cellar", "port"))),
        child_numbers=(("tons", 8, 80), ("price", 50, 400)),
        grands=(("loads", "load"), ("sacks", "sack")),
        grand_numbers=(("kilos", 8, 90), ("volume", 8, 60)),
    ),
    Domain(
        parents=(("players", "player"), ("runners", "runner"), ("rowers", "rower")),
        labels=(("club", ("Lions", "Bears", "Hawks", "Otters", "Foxes")), ("nation", COUNTRIES)),
        numbers=(("rating", 80, 240), ("weight", 40, 110), ("speed", 8, 60)),
        children=(("games", "game"), ("races", "race"), ("matches", "match")),
        child_labels=(("result", ("won", "lost", "drawn", "void")), ("surface", ("grass", "clay", "ice", "sand"))),
        child_numbers=(("points", 8, 60), ("seconds", 50, 400)),
        grands=(("rounds", "round"), ("laps", "lap")),
        grand_numbers=(("pace", 8, 40), ("tempo", 10, 99)),
    ),
)
