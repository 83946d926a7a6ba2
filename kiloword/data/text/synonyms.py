"""Groups of words that mean nearly the same in a caption: our own list, for English captions of everyday photos.

One form a group (number, tense), so that a word can stand in for another as it is. Colours, numbers, places and
relations are omitted: a caption must stay true.
"""

GROUPS = """
man, guy, gentleman, fellow
men, guys, gentlemen, fellows
woman, lady
women, ladies
boy, lad
boys, lads
girl, lass
girls, lasses
child, kid, youngster
children, kids, youngsters
baby, infant
babies, infants
toddler, tot
toddlers, tots
teenager, adolescent, teen
teenagers, adolescents, teens
person, individual, human
people, persons, individuals
crowd, throng
crowds, throngs
friend, companion, pal
friends, companions, pals
group, bunch
groups, bunches
mother, mom, mum
father, dad
couple, pair, duo
family, household
worker, labourer, laborer
workers, labourers, laborers
player, sportsman
athlete, competitor
athletes, competitors
musician, performer
musicians, performers
cyclist, biker, bicyclist
cyclists, bikers, bicyclists
hiker, trekker
hikers, trekkers
policeman, officer, cop
policemen, officers, cops
soldier, trooper
soldiers, troopers
spectator, onlooker, viewer
spectators, onlookers, viewers
dog, hound, canine
dogs, hounds, canines
puppy, pup
puppies, pups
cat, feline
cats, felines
kitten, kitty
kittens, kitties
horse, steed
horses, steeds
cow, bovine
bird, fowl
rabbit, bunny
rabbits, bunnies
animal, creature, beast
animals, creatures, beasts
bug, insect
bugs, insects
car, automobile, auto
cars, automobiles, autos
bicycle, bike
bicycles, bikes
motorcycle, motorbike
motorcycles, motorbikes
truck, lorry
trucks, lorries
airplane, plane, aircraft, aeroplane
airplanes, planes, aeroplanes
boat, vessel
boats, vessels
street, road
streets, roads
path, trail, track
paths, trails, tracks
sidewalk, pavement, walkway
sidewalks, pavements, walkways
city, town
cities, towns
building, structure
buildings, structures
house, home
houses, homes
shop, store
shops, stores
fence, barrier, railing
fences, barriers, railings
wall, partition
beach, shore, seashore
beaches, shores, seashores
ocean, sea
oceans, seas
lake, pond
lakes, ponds
river, stream, creek
rivers, streams, creeks
forest, woods, woodland
hill, slope, incline
hills, slopes, inclines
mountain, peak
mountains, peaks
rock, stone, boulder
rocks, stones, boulders
cliff, bluff, crag
cliffs, bluffs, crags
field, meadow, pasture
fields, meadows, pastures
grass, lawn, turf
grassy, verdant
bush, shrub
bushes, shrubs
flower, blossom, bloom
flowers, blossoms, blooms
branch, limb, bough
branches, limbs, boughs
ground, floor
dirt, soil, earth
picture, image, photo, photograph
pictures, images, photos, photographs
drawing, sketch, illustration
drawings, sketches, illustrations
painting, artwork
backdrop, background
object, thing, item
objects, things, items
shirt, top, tee
shirts, tops, tees
jacket, coat
jackets, coats
trousers, pants, slacks
shoe, footwear
hat, cap
hats, caps
dress, gown
dresses, gowns
outfit, attire, costume, clothing
glasses, spectacles, eyeglasses
sunglasses, shades
bag, sack
bags, sacks
backpack, rucksack, knapsack
backpacks, rucksacks, knapsacks
couch, sofa, settee
couches, sofas, settees
rug, carpet, mat
rugs, carpets, mats
cup, mug
cups, mugs
plate, dish
plates, dishes
drink, beverage
drinks, beverages
candy, sweets
television, tv
telephone, phone
cellphone, mobile
toy, plaything
toys, playthings
present, gift
presents, gifts
stick, twig, rod
sticks, twigs, rods
rope, cord, line
ropes, cords
sign, placard
signs, placards
stage, platform
stairs, steps, staircase
hallway, corridor
race, contest
races, contests
game, match
games, matches
trick, stunt
tricks, stunts
party, celebration
parade, procession
jumping, leaping, hopping, bounding
jumps, leaps, hops, bounds
jump, leap, hop, bound
jumped, leaped, hopped
running, sprinting, racing, dashing
runs, sprints, dashes
run, sprint, dash
walking, strolling, ambling
walks, strolls, ambles
walk, stroll, amble
climbing, scaling
climbs, scales
sitting, seated, perched
sits, perches
sit, perch
resting, relaxing, lounging
rests, relaxes, lounges
standing, upright
playing, frolicking
plays, frolics
looking, gazing, staring, peering
looks, gazes, stares, peers
look, gaze, stare, peer
watching, observing, viewing
watches, observes
watch, observe
smiling, grinning, beaming
smiles, grins, beams
smile, grin, beam
laughing, chuckling, giggling
laughs, chuckles, giggles
crying, weeping, sobbing
shouting, yelling, screaming
shouts, yells, screams
talking, chatting, speaking, conversing
talks, chats, speaks, converses
holding, gripping, clutching, grasping
holds, grips, clutches, grasps
hold, grip, clutch, grasp
carrying, hauling, lugging
carries, hauls, lugs
pulling, tugging, dragging
pulls, tugs, drags
pushing, shoving
pushes, shoves
throwing, tossing, hurling
throws, tosses, hurls
catching, grabbing, snatching
catches, grabs, snatches
catch, grab, snatch
chasing, pursuing
chases, pursues
chase, pursue
wearing, sporting
wears, sports
eating, munching, devouring
eats, munches, devours
drinking, sipping
sips, slurps
cooking, preparing
cooks, prepares
making, creating
makes, creates
diving, plunging
dives, plunges
falling, tumbling
falls, tumbles
sleeping, napping, dozing, snoozing
sleeps, naps, dozes
hugging, embracing, cuddling
hugs, embraces, cuddles
waving, gesturing
performing, executing
performs, executes
attempting, trying
attempts, tries
try, attempt
surrounding, encircling
surrounded, encircled
covered, coated, blanketed
crowded, packed, busy
large, big, sizable
huge, enormous, giant, gigantic, massive
small, little
tiny, minute, miniature
tall, lofty
young, youthful
old, elderly, aged
happy, cheerful, joyful, glad
sad, unhappy, sorrowful
pretty, beautiful, lovely, attractive
wet, soaked, drenched
dirty, grimy, filthy
shiny, glossy, gleaming
bright, vivid, brilliant
dark, dim, gloomy
colorful, colourful, multicolored
rocky, stony, craggy
snowy, snow-covered
steep, sheer
fast, quick, rapid, swift
quickly, rapidly, swiftly, speedily
slowly, gradually
empty, vacant, deserted
fluffy, fuzzy, furry
hairy, shaggy
striped, stripy
hollow, outlined
solid, filled
"""
