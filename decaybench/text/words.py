"""Common English adjectives and nouns, of which a needle's key takes one each: `brave-lantern`.

Both lists are sorted, without repeats, of small letters only. Samples are drawn by a word's place, so a change here
changes every sample whose keys are words.
"""

from __future__ import annotations

_ADJECTIVES = """
able absent abstract active actual acute adequate adjacent aged agile alert alien alive aloof amber ample amused ancient
angry annual anxious apparent apt arctic artful ashen asleep astute athletic austere autumnal average awake aware
awkward balanced bare basic bearded beautiful bent bitter bland blank bleak blessed blind blue blunt bold bookish boring
bossy bouncy brave breezy brief bright brisk brittle broad broken bronze brown bubbly burly bushy busy calm candid
capable careful careless casual cautious central certain charming chatty cheap cheerful chief chilly civic civil clean
clear clever cloudy clumsy coarse coastal cold colossal comfy comic common compact complete complex concise confident
constant content cool copper coral cordial correct cosmic costly cosy courteous crafty creamy creative crimson crisp
crooked crowded crucial crude cruel crunchy cryptic curious curly current daily damp daring dark dazzling dear decent
deep defiant deft delicate dense dental diligent dim direct distant dizzy docile domestic dormant double dramatic drowsy
dry dual dull durable dusty dutiful eager early earnest earthy eastern easy elastic elder elegant elite eloquent empty
endless enormous entire equal essential eternal even exact exotic expert external extra faded faint fair faithful false
familiar famous fancy far fast fatal fearless feeble feral fertile festive fierce fiery final fine firm fiscal fit fixed
flaky flat fleet flexible floral fluent fluffy fluid foggy fond foolish foreign formal fortunate fragile fragrant frank
free frequent fresh friendly frosty frozen frugal full funny fuzzy gallant gaudy generous gentle genuine giant giddy
gifted glad gleaming global gloomy glossy golden good graceful gracious grand grassy grateful grave gray greasy great
green gritty grumpy guilty gusty handsome handy happy hardy harsh hasty hazy healthy hearty heavy helpful hoarse hollow
homely honest hopeful horizontal hot huge human humble humid hungry hushed husky icy ideal idle immense important inner
innocent intense internal ivory jagged jaunty jealous jolly jovial joyful juicy junior keen kind known large lasting
late lavish lawful lazy leafy lean legal lenient level light likely limber limited linear liquid literal little lively
local lofty lone long loose loud lovely loyal lucid lucky luminous lunar lush magnetic main major marble marine massive
mature meager mealy meek mellow merry mighty mild mindful minor misty mobile modern modest moist moody moral muddy
muffled mundane musical mute mutual mystic naive narrow native natural naval neat needy nervous neutral new nimble noble
nocturnal noisy normal northern notable novel numb obedient oblong obscure odd official oily old olive opaque open
optimal oral orange ordinary organic ornate outer oval pale parallel partial passive patient peaceful peculiar perfect
petite placid plain plastic playful pleasant plucky plump poetic polar polished polite popular portable posh positive
potent practical precious precise pretty primal prime private prompt proper proud prudent public pure purple puzzled
quaint quick quiet quirky radiant rainy random rapid rare raw ready real recent regal regular relaxed reliable remote
restful restless rich rigid ripe robust rocky romantic rosy rotten rough round rowdy royal rubbery rugged rural rustic
rusty sacred sad safe salty sandy sane savory scarce scarlet scenic secret secure sedate senior sensible serene serious
severe shabby shaded shaggy shallow sharp shiny short shrewd shy silent silky silly silver simple sincere single sizable
skilled sleek sleepy slender slim slippery slow sly small smart smooth snowy snug sober social soft solar solemn solid
sombre sonic sore sour southern spare sparse speedy spicy spiral spirited splendid spotless stable stale stark steady
steep sterile stern sticky stiff still stormy stout straight strange strict strong stubborn sturdy subtle sudden sunny
super superb supple sure sweet swift tactful talented tall tame tangible tart tasty tender tense tepid terse thankful
thick thin thirsty thorny thorough thoughtful thrifty tidy tight timely timid tiny tired tough tranquil trendy tricky
tropical trusty twin typical ultimate unique upbeat upper upright urban urgent useful usual vacant vague valid valued
vast velvet verbal vertical vibrant victorious vigilant violet virtual visible vital vivid vocal volatile wandering warm
wary watchful wavy weak wealthy weary weekly weird western wet whole wicked wide wild willing windy winged wintry wise
witty wonderful wooden woolen worldly worn worthy yearly yellow young youthful zealous zesty
"""

_NOUNS = """
abbey acorn acre actor advice affair agent air airport album alley almond altar amber anchor angle animal ankle ant
anvil apple apron arch archer arena arm armor arrow artist aspen atlas attic author avenue award axis axle badge badger
bag baker balcony ball balloon bamboo banana band banjo bank banner barge bark barley barn barrel basin basket bath
battery bay beach beacon bead beak beam bean bear beard beast beaver bed bee beetle bell belt bench berry bicycle bird
biscuit bishop blade blanket blaze block blossom board boat bolt bone bonnet book boot border bottle boulder boundary
bow bowl box branch brand brass bread breeze brick bridge broom brother brush bucket buckle bud buffalo bugle builder
bulb bulletin bundle butcher butter button cabbage cabin cabinet cable cactus cake calendar camel camera camp canal
candle candy cannon canoe canvas canyon cape captain caravan card carpenter carpet carriage carrot cart castle cat
cattle cave cedar ceiling cellar center chain chair chalk chamber champion channel chapel chapter charcoal chariot
cheese cherry chess chest chicken chief child chimney chin choir church cinema circle circus city clam clay clerk cliff
cloak clock cloth cloud clover clown club coach coal coast coat cobbler coconut coffee coil coin collar college colony
color column comb comet comma compass concert cook copper coral cord cork corn corner cottage cotton couch council
county course court cousin cove cow crab cradle crane crater crayon cream creek crew cricket crop cross crowd crown
crystal cube cup cupboard current curtain curve cushion cycle daisy dance danger dawn deck deer degree delta dentist
desert desk dessert diamond diary diet dinner dinosaur dish district doctor dog doll dolphin dome donkey door dough dove
dozen dragon drawer dream dress drill driver drum duck dune dust eagle ear earth easel echo edge eel egg elbow elephant
elevator elm ember empire engine envelope equator error escape estate evening event exam example exile eye fabric face
factory fair falcon family fan farm farmer father faucet feast feather fence fern ferry festival fiddle field fig figure
film finch finger fire fish flag flame flask fleet flock flood floor flour flower flute foam fog food foot forest forge
fork fort fossil fountain fox frame friend frog frost fruit fuel funnel furnace galaxy gallery game garage garden garlic
gate gazelle gem general geyser giant ginger giraffe glacier glass globe glove glue goat goblet gold goose gorge gown
grain grape grass gravel grove guard guest guide guitar gulf habit hail hair hall hammer hammock hamster hand handle
hangar harbor harness harp harvest hat hawk hay hazel head heap heart hedge heel helmet hen herald herb herd hero heron
hill hinge hive hobby hockey holiday home honey hood hook horizon horn horse hospital hotel hour house hunter hut ice
icicle idea igloo image inch ink inn insect iron island ivy jacket jade jam jar jaw jelly jewel jigsaw joke journal
journey judge jug juice jungle kangaroo kayak kettle key keyboard kitchen kite kitten knee knife knight knot label lace
ladder lagoon lake lamb lamp lantern lark lasso lawn lawyer leaf leather ledge lemon lemonade lens leopard lesson letter
lettuce lever library lighthouse lily lime lion lizard loaf lobster lock locket locomotive log loom lotus lounge lumber
lunch machine magnet maid mail mango manor mansion mantle map maple marble march market mask mast master match maze
meadow meal medal melody melon member memory merchant metal meteor mile milk mill miner mint mirror mist mitten moat
model mole moment monarch money monkey month moon moose morning mosaic moss moth motor mountain mouse mouth mule muscle
museum mushroom music mustard nail name napkin nation neck necklace nephew nest net nickel night noodle north nose
notebook novel nurse nut oak oar oasis oat object ocean office olive onion opera orbit orchard orchid organ ornament
ostrich otter outfit oven owl ox oyster package paddle page paint pair palace palm pan panda panel pansy panther paper
parade parcel park parrot parsley party path patio pattern paw peach peacock peak peanut pear pearl pebble pedal pelican
pen pencil penguin pepper perch person petal phone photo piano pickle picnic picture pier pigeon pillar pillow pilot
pine pipe pitcher pizza plane planet plank plant plate platform plaza plum plumber pocket poem poet pole pond pony pool
poppy porch port porter portrait pot potato potter powder prairie present prince print prize profit project prophet
puddle pulley pump pumpkin pupil puppet puppy purse puzzle pyramid quarry quarter queen quilt quiver rabbit raccoon race
radar radio radish raft rail railway rain rainbow raisin ranch ranger raven razor record reed reef region reindeer relic
report reptile rescue resort ribbon rice riddle ridge ring ripple river road robe robin robot rock rocket roof room root
rope rose route rubber ruby rudder rug ruler runner saddle sail sailor salad salmon salt sand sandal sandwich satchel
satellite saucer sausage saw scale scarf school science scissors scooter screen screw scroll sculptor sea seal season
seat secret seed senator servant shadow shark shed sheep sheet shelf shell shelter shepherd shield ship shirt shoe shop
shore shoulder shovel shrimp shrub sign signal silk sink sister skate sketch skirt skull sky sled sleeve slope smoke
snail snake snow soap sofa soil soldier song soup spade sparrow spear spider spindle spoon spring spruce squad square
squash squirrel stable stadium staff stage stair stamp star station statue steam steel stem step stick stocking stone
stool storm story stove stranger straw stream street string student studio sugar suit suitcase summer summit sun sunset
surgeon swamp swan sweater swing sword symbol syrup system table tablet tailor tango tank target tavern tea teacher team
temple tent terrace theater thimble thistle thorn thread throat throne thumb thunder ticket tiger timber tin toast
tomato tongue tool tooth torch tortoise tourist towel tower town toy track tractor trade trail train traveler tray
treasure tree trench triangle tribe trick trolley trophy trout truck trumpet trunk tulip tunnel turkey turnip turtle
twig umbrella uncle uniform valley valve van vanilla vase vault vehicle velvet verse vessel village vine vinegar viola
violin visitor voice volcano voyage waffle wagon waiter wall wallet walnut walrus warrior watch water waterfall wave wax
weather weaver wedding weed week well whale wheat wheel whisker whisper whistle widow willow wind window wine wing
winner winter wire wizard wolf woman wood wool worker workshop world worm wreath wren wrist writer yacht yard yarn year
yogurt zebra zephyr zipper
"""

ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
