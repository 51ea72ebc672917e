"""Sixty everyday questions by somebody who trained nothing, and the rule for each answer.

They were written from what the pair says of itself ("What can you do?"), before its courses were
read. No question is used in training.
"""

from .questions import HONEST, Question, ends, function, holds, json_with, never, story

STRANGERS = (
    Question("What is 8 plus 7?", ends("15")),
    Question("6+3", ends("9")),
    Question("how much is 20 minus 4?", ends("16")),
    Question("Can you add 14 and 25?", ends("39")),
    Question("What's 9 - 9?", ends("0")),
    Question("50 + 30 = ?", ends("80")),
    Question("Subtract 6 from 18.", ends("12")),
    Question("What is 2 plus 2 plus 2?", ends("6"), outside=True),
    Question("I have 7 apples and buy 5 more. How many apples do I have?", ends("12", "12 apples")),
    Question("Anna has 15 euros and spends 6. How much is left?", ends("9", "9 euros")),
    Question(
        "There are 20 children on a bus and 8 get off. How many are still on the bus?",
        ends("12", "12 children"),
    ),
    Question(
        "A box holds 4 eggs and another holds 9. How many eggs are there altogether?",
        ends("13", "13 eggs"),
    ),
    Question(
        "Tom had 10 balloons, 3 flew away. How many does he have now?", ends("7", "7 balloons")
    ),
    Question("How many centimetres are 3 metres?", holds(r"\b300\b")),
    Question("Convert 2 hours to minutes.", holds(r"\b120\b")),
    Question("How many grams are in 5 kilograms?", holds(r"\b5,?000\b")),
    Question("How many days are there in 2 weeks?", holds(r"\b14\b")),
    Question("What date comes after 31 March?", ends("1 April", "April 1", "1st of April")),
    Question("What is the date 5 days after 10 June?", ends("15 June", "June 15")),
    Question("Which month comes after July?", ends("August"), outside=True),
    Question("How many days does April have?", holds(r"\b30\b"), outside=True),
    Question("What day is it two days after Monday?", ends("Wednesday")),
    Question("Which day comes before Friday?", ends("Thursday")),
    Question("If today is Sunday, what day is tomorrow?", ends("Monday")),
    Question("What day comes after Saturday?", ends("Sunday")),
    Question("Sort 9, 3, 7, 1.", ends("1, 3, 7, 9", "1, 3, 7 and 9")),
    Question("Put these numbers in order: 12, 5, 30, 8", ends("5, 8, 12, 30", "5, 8, 12 and 30")),
    Question("Sort the words pear, apple, fig", ends("apple, fig, pear"), outside=True),
    Question(
        "Can you sort 40, 20 and 10 from small to large?", ends("10, 20, 40", "10, 20 and 40")
    ),
    Question("Which is the biggest: 14, 62 or 37?", ends("62")),
    Question("What's the largest number in 5, 19, 11, 2?", ends("19")),
    Question("Find the highest of 8, 80 and 18.", ends("80")),
    Question("Which of 3, 8, 11, 14 are even?", ends("8, 14", "8 and 14")),
    Question("Keep only the numbers above 10: 4, 12, 9, 25", ends("12, 25", "12 and 25")),
    Question("List the odd numbers in 2, 5, 6, 9.", ends("5, 9", "5 and 9")),
    Question("How many letters are in the word garden?", ends("6", "6 letters"), outside=True),
    Question('How many words are in "the cat sat down"?', ends("4", "4 words")),
    Question(
        "How many times does the letter a appear in banana?", ends("3", "3 times"), outside=True
    ),
    Question("Is 17 bigger than 12?", holds(r"\byes\b|17 is (bigger|larger|greater|more)")),
    Question(
        "Which is larger, 45 or 54?", holds(r"54 is (the )?(bigger|larger|greater|more)|54\W*$")
    ),
    Question(
        "Is 8 less than 3?",
        holds(r"\bno\b|8 is (bigger|larger|greater|more|not)|3 is (less|smaller)"),
    ),
    Question("Is 7 odd or even?", ends("odd")),
    Question("Is 36 an even number?", holds(r"\byes\b|is even")),
    Question(
        "An apple costs 2 euros and a pear costs 3 euros. What do an apple and a pear cost together?",
        ends("5", "5 euros"),
    ),
    Question(
        "Prices: bread 4, milk 2, cheese 7. Which one is the most expensive?",
        holds(r"cheese\b[^.]*\.?\W*$"),
    ),
    Question("Write JSON with name Eve and age 30.", json_with("Eve", "30")),
    Question(
        "Give me a JSON object for a dog called Rex who is 4 years old.", json_with("Rex", "4")
    ),
    Question('Change "dog" to "horse" in: The dog runs home.', holds("the horse runs home")),
    Question(
        "Write this sentence in capitals: good morning", lambda answer: "GOOD MORNING" in answer
    ),
    Question("Remove the word very from: it is a very cold day", holds("it is a cold day")),
    Question("Tell me a story about a cat.", story("cat")),
    Question("Write a short story with Tom and a boat.", story("Tom", "boat")),
    Question("Can you write me a little story?", story()),
    Question("Write a Python function that doubles a number.", function((3,), 6)),
    Question(
        "Write a Python function that returns the larger of two numbers.", function((2, 5), 5)
    ),
    Question("Hi, who are you?", holds(r"\bI am\b|\bI'm\b")),
    Question("Thank you very much!", lambda answer: bool(answer) and not HONEST.search(answer)),
    Question(
        "Who was the first president of the United States?", holds("Washington"), outside=True
    ),
    Question("Wie spät ist es?", never, outside=True),
    Question("qwrtz plok vanu", never, outside=True),
)
