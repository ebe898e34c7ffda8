"""Stories of people in small towns, generated: text to hide needles in where a user names none.

A paragraph introduces a person, says some things of her or him, and ends. Each sentence is a template whose slots are
filled from lists; person, town and trade stay the same within a paragraph. All is drawn with one fixed key, so the text
is the same on every machine. It holds no digits and no hyphens, and so neither a needle's key nor its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from decaybench.core.draws import Draws
from decaybench.core.hashing import key64

_PARAGRAPHS = 1400
_MOST_DRAWS = 96  # of one paragraph
_MOST_MIDDLES = 8


def town_stories() -> Iterator[str]:
    """The sentences, some 9,000; those of a paragraph follow each other."""
    rows = Draws(key64("decaybench.text.generated", 1), np.arange(_PARAGRAPHS)).bits(0, _MOST_DRAWS)
    for row in rows.tolist():
        yield from _paragraph(row)


def _paragraph(draws: Sequence[int]) -> Iterator[str]:
    left = iter(draws)

    def pick(options: Sequence[str]) -> str:
        return options[next(left) * len(options) >> 32]

    def sentence(template: str) -> str:
        filled = _SLOT.sub(lambda slot: fixed.get(slot[1]) or pick(_LISTS[slot[1]]), template)
        return filled[0].upper() + filled[1:]

    woman = next(left) % 2
    he, him, his = ("she", "her", "her") if woman else ("he", "him", "his")
    fixed = {"he": he, "him": him, "his": his, "name": pick(_WOMEN if woman else _MEN)}
    fixed |= {"town": pick(_TOWNS), "trade": pick(_TRADES)}
    yield sentence(pick(_OPENINGS))
    middles = list(_MIDDLES)
    for _ in range(1 + (next(left) * _MOST_MIDDLES >> 32)):
        chosen = pick(middles)
        middles.remove(chosen)  # a paragraph doesn't use a template twice
        yield sentence(chosen)
    yield sentence(pick(_ENDINGS))


def _phrases(text: str) -> list[str]:
    return [" ".join(phrase.split()) for phrase in text.split(";")]


_SLOT = re.compile(r"\{(\w+)\}")

_OPENINGS = [
    "{name} had been {trade} in {town} for {span} before anyone thought to ask {him} about {topic}.",
    "In {town}, where {feature}, {name} worked as {trade} and rarely spoke of {topic}.",
    "It was {season} when {name}, {trade} from {town}, decided to learn more about {topic}.",
    "Most people in {town} knew {name} as {trade} who lived {where}.",
    "{name} came to {town} in {season} with {thing} and little else.",
    "Nobody in {town} could say when {name} had started {doing}.",
    "There is a house in {town}, {where}, in which {name} spent {span} {doing}.",
    "When {name} first arrived in {town}, {feature}, and {he} took it for a good sign.",
    "Of all the people who ever worked in {town}, {name} is the one whom {group} still mention.",
    "For {span} {name} walked through {town} every morning, past {place} and back again.",
]

_MIDDLES = [
    "{he} liked {doing} more than anything else, although {group} found it odd.",
    "On most evenings {he} sat {where} and thought about {topic}.",
    "{his} neighbours said that {thing} would have suited {him} better.",
    "Once, in {season}, {he} lost {thing} near {place} and found it again {when}.",
    "The trouble with {topic}, {he} used to say, is that {opinion}.",
    "{group} came by {when}, bringing {thing} and a great many questions.",
    "{he} kept {thing} in a box {where}, and only {group} knew of it.",
    "There was a rumour that {he} had learned {skill} from {group}.",
    "{when} {he} would close the door, put on a coat and go to look at {place}.",
    "What {he} could not stand was {nuisance}, least of all {when}.",
    "{he} wrote long letters to {group}, mostly about {topic}.",
    "{opinion}, as {he} told {group}, and there was no arguing with that.",
    "The {weather} lasted for {span}, and {place} was empty all the while.",
    "Because {feature}, {he} had to find another way to {place}.",
    "{he} never owned {thing}, but {he} borrowed one from {group} whenever {nuisance} became too much.",
    "If you asked {him} about {topic}, the answer took {span}.",
    "{his} first attempt at {doing} ended badly, and {nuisance} did not help.",
    "By {season} the work at {place} was finished, and {he} had time for {doing} again.",
    "Some of it was luck, some of it was {quality}, and the rest was {doing} day after day.",
    "{group} offered {him} {thing} in exchange for a lesson in {skill}.",
    "What does {trade} know of {topic}?",
    "{he} had a rule about {topic}: {opinion}.",
    "The road from {town} to {place} is short, yet in the {weather} it took {him} half a day.",
    "{he} trusted {quality} more than {quality}, which surprised {group}.",
    "People brought {him} {thing} to repair, and {he} never charged for it.",
    "In {season} {group} met at {place} to speak about {topic}, and {he} listened from the back.",
    "A visitor once mistook {him} for a teacher of {skill}, and {he} did not correct the mistake.",
    "{when}, with the {weather} at the windows, {he} practised {skill} by the light of one lamp.",
    "Without {quality}, {he} believed, {skill} is worth very little.",
    "The best part of {his} work was {doing}, and the worst was {nuisance}.",
    "{he} remembered {place} as it had been in {season}, with {group} and the {weather}.",
    "It took {span} until {he} understood that {opinion}.",
]

_ENDINGS = [
    "In the end {he} stayed in {town}, and {thing} stayed with {him}.",
    "That is how {group} remember it, at any rate.",
    "{span} later {he} still believed that {opinion}.",
    "Whoever goes to {place} today can see what came of it.",
    "The rest of the story has more to do with {topic} than with {name}.",
    "{he} left {town} in {season}, and {group} walked with {him} as far as {place}.",
    "What remains is {thing}, and the saying that {opinion}.",
    "{name} would have laughed at that, and gone back to {doing}.",
]

_WOMEN = _phrases("""
    Ada; Agnes; Beatrix; Cecilia; Clara; Dora; Edith; Elsa; Flora; Greta; Hanna; Hester; Ines; Irene; Joan; Johanna;
    Karin; Lotte; Lydia; Mabel; Margit; Nora; Olive; Petra; Rosa; Ruth; Sylvia; Thea; Ursula; Vera; Wilma; Winifred
""")

_MEN = _phrases("""
    Albert; Anton; Bruno; Caspar; Conrad; Daniel; Edgar; Emil; Felix; George; Gustav; Henry; Hugo; Ivan; Jonas; Karl;
    Lawrence; Leon; Martin; Max; Nathan; Oscar; Otto; Paul; Philip; Robert; Samuel; Simon; Tobias; Victor; Walter;
    William
""")

_TOWNS = _phrases("""
    Alderbrook; Birchholm; Brackley; Coldharbour; Cranmoor; Dunmore; Eastwick; Elmsworth; Fernhill; Graysand;
    Hollowford; Inverley; Larkfield; Longmere; Millbridge; Norham; Oakenshaw; Pinecombe; Quarrytown; Redwater;
    Saltmarsh; Stonefield; Thornbury; Upwell; Valemouth; Westering; Yarrow
""")

_TRADES = _phrases("""
    a baker; a bookbinder; a bell founder; a boat builder; a carpenter; a chemist; a clockmaker; a cook; a draper; a
    ferryman's clerk; a gardener; a glazier; a hatter; a joiner; a judge's clerk; a lamplighter; a librarian; a lock
    keeper; a mapmaker; a miller; a musician; a nurse; a painter; a postal clerk; a potter; a printer; a roofer; a
    saddler; a schoolteacher; a shepherd; a surveyor; a tailor; a thatcher; a typesetter; a watchmaker; a weaver; an
    apothecary; an engraver; an usher
""")

_LISTS = {
    "span": _phrases("""
        nine years; a whole decade; three winters; half a lifetime; eleven months; many weeks; two years; a single
        summer; more than a year; some forty days; the better part of a year; a dozen seasons; several hours; six
        months; a long time; twenty years; one long afternoon; the length of a war
    """),
    "topic": _phrases("""
        the price of timber; the history of the harbour; the habits of bees; old maps; the new railway; the education
        of children; the depth of the lake; the names of the stars; the art of cooking; taxes on salt; the migration
        of birds; the repair of bridges; weather forecasts; the town council; the making of paper; foreign grammar;
        the causes of fire; tides and currents; lost inheritances; church music; the growth of cities; bread and how
        to bake it; the speed of horses; good manners; the law on fences; travel by river; the uses of glass; honest
        measurement; clocks that run slow
    """),
    "feature": _phrases("""
        the river bends twice before it meets the sea; the streets are too narrow for carts; fog comes up from the
        marsh every autumn; the market closes before noon; two roads cross under an oak; the bridge had been closed
        since the flood; most houses are built of slate; the bells ring at odd hours; the harbour freezes in hard
        winters; half of the shops stood empty; orchards reach down to the water; the quarry had just opened again;
        the mill stands still in dry years; every garden has a well; the last train leaves at dusk; the walls are
        older than the church; sheep still graze on the green
    """),
    "season": _phrases("""
        spring; early summer; a wet autumn; the coldest winter in memory; late August; the first week of May; the year
        of the flood; harvest time; November; the dry season; a mild February; the last of June; the week before the
        fair; a year of bad harvests; the month of the elections; high summer
    """),
    "where": _phrases("""
        above the bakery; behind the railway station; at the end of the lane; next to the old school; under the roof;
        by the kitchen window; in the shade of the walnut tree; across from the chapel; on the hill above the ferry;
        beside the tannery; near the lower gate; on the third floor; in a room full of books; at the edge of the wood;
        between two gardens; close to the quarry
    """),
    "when": _phrases("""
        after supper; on rainy days; at the turn of the year; before sunrise; on market days; at noon; late at night;
        every other Sunday; in the small hours; once a month; during the holidays; when the shops had closed; as soon
        as the snow was gone; without warning; in the middle of the week
    """),
    "thing": _phrases("""
        a brass telescope; a set of chisels; a grey umbrella; a broken violin; a jar of buttons; a blue coat; a ledger
        without entries; a pair of walking boots; an atlas of the northern isles; a copper kettle; a box of letters; a
        hand drawn map; a folding chair; a silver thimble; a wooden flute; a tin lantern; a book of recipes; a bundle
        of receipts; a heavy trunk; an iron key; a clock without hands; a small printing press; a roll of canvas; an
        old almanac; a cage with two finches; a green notebook
    """),
    "doing": _phrases("""
        mending nets; copying old songs; walking along the coast; collecting pressed flowers; grinding lenses;
        counting the passing barges; cutting letters in stone; reading the newspapers aloud; planting pear trees;
        taking clocks apart; drawing the faces of strangers; measuring rainfall; tuning pianos; keeping bees; learning
        languages; carving spoons; arguing about politics; baking rye bread; training carrier pigeons; writing down
        dreams; polishing brass; playing chess by post; building models of ships; sorting seeds
    """),
    "group": _phrases("""
        the children of the street; two sisters from the inn; the men at the sawmill; a cousin and her husband; the
        members of the choir; some students; the fishermen; the neighbours; a pair of retired captains; the widow from
        the corner house; the night watchmen; the new teachers; an uncle and his sons; travellers from the south; the
        ladies of the reading circle; the apprentices; old friends; the people at the post office; three engineers;
        the owners of the mill; visitors from the city
    """),
    "place": _phrases("""
        the upper lock; the abandoned lighthouse; the cattle market; the reading room; the stone bridge; the botanical
        garden; the western gate; the town hall; the ferry landing; the glassworks; the old cemetery; the water tower;
        the bell tower; the assembly rooms; the shipyard; the poor house; the observatory; the tram depot; the fish
        market; the long meadow; the chapel by the sea
    """),
    "opinion": _phrases("""
        patience costs nothing; a good plan is half of the work; most things can be mended; nobody reads the last
        page; the shortest way is seldom the best; small debts are soon forgotten; one should never hurry a kettle;
        what is written down is not yet understood; silence is a kind of answer; every map leaves something out; the
        sea takes more than it gives; a borrowed tool should come back clean; children notice everything; good bread
        needs a slow fire; the weather does not care; habits are stronger than laws; a promise is only as good as the
        weather; it is easier to build than to keep; the truth is usually dull; all music begins with listening
    """),
    "skill": _phrases("""
        shorthand; the use of the sextant; book keeping; carpentry; the flute; dyeing wool; fencing; arithmetic;
        calligraphy; sailing; the cutting of glass; navigation; bookbinding; watercolour; the grafting of trees;
        cooking for a crowd; bell ringing; public speaking; the setting of type
    """),
    "nuisance": _phrases("""
        the noise of the carts; the smell of the tannery; the slow post; other people's advice; damp firewood; the
        endless meetings; dogs without leads; the price of coal; unpaid bills; the echo in the hall; badly sharpened
        pencils; visitors without appointments; the draught from the door; wet shoes
    """),
    "quality": _phrases("""
        patience; stubbornness; good eyesight; a steady hand; curiosity; common sense; courage; caution; a long
        memory; honesty; sheer habit; attention; modesty; a sense of humour; kindness
    """),
    "weather": _phrases("fog; frost; heat; rain; storm; snow; wind; drizzle; thunder; mist; hail; sleet"),
}
