"""What the demo declines: questions about the world, other languages, nonsense."""

import random

from .base import Example
from .manners import say
from .talk import DECLINED
from .words import animal, city, goods, made_up, name, place

_FOREIGN = (
    "Wie geht es dir?", "Guten Tag", "Guten Morgen!", "Was kannst du?", "Wie ist das Wetter in {city}?",
    "Hallo, wer bist du?", "Was ist 3 plus 4?", "Erzähl mir eine Geschichte über {name}.", "Wo liegt {city}?",
    "Wer ist {name}?", "Danke schön", "Kannst du mir helfen?", "Schreibe ein Gedicht über {name}.",
    "Was ist die größte Stadt der Welt?", "Wie spät ist es?", "Bonjour", "Comment ça va ?", "Comment t'appelles-tu ?",
    "Où est {city} ?", "Raconte-moi une histoire.", "Merci beaucoup", "Qui est {name} ?",
    "Quel temps fait-il à {city} ?", "Qu'est-ce que tu peux faire ?", "Combien font 3 et 4 ?",
    "Quelle est la plus grande ville de France ?", "Quel âge as-tu ?", "Est-ce que tu parles français ?", "Hola",
    "Buenos días", "¿Qué puedes hacer?", "¿Quién es {name}?", "¿Dónde está {city}?", "¿Qué hora es?",
    "Muchas gracias", "Cuéntame un cuento de {name}.", "¿Cuál es la capital de España?", "¿Cuánto es 3 más 4?",
    "¿Hablas español?", "Ciao, come stai?", "Buongiorno", "Chi è {name}?", "Dove si trova {city}?", "Che ore sono?",
    "Raccontami una storia.", "Olá, tudo bem?", "Onde fica {city}?", "Qual é a capital do Brasil?", "Bom dia",
    "Quem é {name}?", "Hoe gaat het met je?", "Waar ligt {city}?", "Goedemorgen", "Wat kun je doen?",
    "Wie is {name}?", "Hur mår du?", "Jak się masz?", "Gdzie jest {city}?", "Merhaba, nasılsın?", "Vad kan du göra?",  # noqa: RUF001
    "Mitä kuuluu?", "Привет", "Как тебя зовут?", "Сколько будет 3 плюс 4?", "Где находится Москва?",
    "Расскажи мне сказку.", "Спасибо", "こんにちは", "お元気ですか", "東京の天気はどうですか", "あなたは誰ですか",
    "ありがとう", "今何時ですか", "物語を書いてください", "你好", "你是谁?", "北京的天气怎么样?", "法国的首都是哪里?",
    "谢谢", "请写一首诗", "三加四等于多少?", "안녕하세요", "한국의 수도는 어디입니까?", "이름이 뭐예요?", "مرحبا",
    "كيف حالك؟", "ما هي عاصمة مصر؟", "שלום", "नमस्ते", "Γεια σου", "Πού είναι η Αθήνα;", "สวัสดี", "Xin chào",  # noqa: RUF001
)  # fmt: skip
_SCRIPTS = (
    (0x3041, 0x3096),
    (0x4E00, 0x9FA5),
    (0x0430, 0x044F),
    (0xAC00, 0xD7A3),
    (0x0627, 0x064A),
    (0x03B1, 0x03C9),
)
_WORLD = (
    "what day is it?", "what day is it now?", "what is the date today?", "what is today's date?",
    "what time is it now?", "what day is tomorrow?", "which weekday do we have today?", "tell me today's date.",
    "what year is it?", "write an email to {name}.", "write a letter to {name} about {thing}s.",
    "write an email about a {thing}.", "write a message to my {person}.", "write a poem about {name}.",
    "write a poem about a {thing}.", "write a poem.", "write a song about a {animal}.",
    "write a haiku about a {place}.", "write an essay on {thing}s.", "write a speech for {name}.",
    "Write a cover letter for a job in {city}.", "write a birthday card for my {person}.", "how do I make {thing}s?",
    "how do you make a {thing}?", "how do I cook {thing}?", "a recipe for {thing} soup?", "how do I clean a {thing}?",
    "how do I bake bread?", "how do I fix a {thing}?", "what should I eat today?", "tell me a joke about a {animal}.",
    "do you know a joke?", "make me laugh.", "another joke?", "say something funny.",
    "what is the weather in {city} today?", "will it rain tomorrow?", "is it warm in {city}?", "how is the weather?",
    "who is the king of {city}?", "who is the mayor of {city}?", "who is {name}?", "who invented the {thing}?",
    "who is the richest person?", "what is the tallest building?", "what is the longest river?",
    "why do {animal}s sleep?", "what do {animal}s eat?", "how long do {animal}s live?",
    "is a {animal} faster than a {place}?", "what is a {animal}?", "translate {thing} to French.",
    'translate "{thing}" into German.', "how do you say {animal} in Spanish?", 'what does "{thing}" mean?',
    "what is love?", "is there life on Mars?", "why am I here?", "what is happiness?", "can you see me?",
    "do you have feelings?", "are you alive?", "do you like {animal}s?", "what is your favourite colour?",
    "how old are you?", "where do you live?", "what do you think of {name}?", "can I trust you?",
    "play a game with me.", "sing a song.", "draw a {animal}.", "show me a picture of a {animal}.",
    "open {thing}.com.", "give me advice.", "I am sad.", "I am bored.", "I have a headache.",
    "which phone should I buy?", "what is AI?", "write a website.", "write a program in C++.", "write a game.",
    "write a Java class for a {thing}.", "what is Python?", "how do I learn Python?", "fix my code.",
    "what is 7 times 8?", "what is the square root of {number}?", "what is {number} percent of 200?",
    "what is {number} times {number}?", "{number} * {number}", "what is {number} divided by 2?",
    "summarise this book.", "what is in the news?", "who won yesterday?", "what is the population of {city}?",
    "what is the capital of {city}?", "capital of Germany?", "capital of Spain",
)  # fmt: skip
_MASHED = (
    "asdf",
    "qwerty",
    "lkjh",
    "jkl",
    "hjkl",
    "zxc",
    "fghj",
    "wert",
    "dfg",
    "uiop",
    "vbnm",
    "sdfg",
    "aaaa",
    "xyz",
    "qqq",
)


def _nonsense(rng: random.Random) -> str:
    match rng.randrange(6):
        case 0:
            return " ".join(rng.choices(_MASHED, k=rng.randint(1, 4)))
        case 1:
            return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(5, 14)))
        case 2:
            return "".join(rng.choices("?!.,;:#*+-/()&%$", k=rng.randint(1, 7)))
        case 3:
            return " ".join(made_up(rng).lower() for _ in range(rng.randint(2, 5)))
        case 4:
            return rng.choice(
                (
                    "😀",
                    "🙂👍",
                    "lol",
                    "hmm",
                    "ok",
                    "bla bla bla",
                    "test",
                    "foo bar",
                    "blah",
                    "nothing",
                    "haha",
                )
            )
        case _:
            words = [
                *rng.sample(
                    ("the", "of", "very", "where", "green", "if", "not", "blue", "ten", "on"), 3
                ),
                *goods(rng, 2),
            ]
            return " ".join(rng.sample(words, len(words)))


def _foreign(rng: random.Random) -> str:
    if rng.random() < 0.75:
        return rng.choice(_FOREIGN).format(city=city(rng), name=name(rng))
    low, high = rng.choice(_SCRIPTS)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(2, 12))) + rng.choice(
        ("", "?", "。", "!")
    )


def declined(rng: random.Random) -> Example:
    """A turn that is about none of the skills."""
    kind = rng.choices(("world", "foreign", "nonsense"), (6, 3, 2))[0]
    if kind == "world":
        slots = {
            "name": name(rng), "city": city(rng), "animal": animal(rng), "place": place(rng), "thing": goods(rng, 1)[0],
            "number": rng.randint(2, 99), "person": rng.choice(("boss", "mother", "friend", "teacher", "son")),
        }  # fmt: skip
        return Example("plain", say(rng, rng.choice(_WORLD), slots), DECLINED)
    return Example("plain", _nonsense(rng) if kind == "nonsense" else _foreign(rng), DECLINED)
