"""Tasks of the embedded models, whose problems are drawn and not stored, and their tokenizer."""

from lit_dlm.toy.addition import Addition
from lit_dlm.toy.countdown import Countdown
from lit_dlm.toy.pictures import DigitDrawings, DigitScorer, PictureDrills, PictureQuestions
from lit_dlm.toy.python_functions import PythonFunctions
from lit_dlm.toy.sudoku import Sudoku
from lit_dlm.toy.word_problems import WordProblems

__all__ = [
    "Addition",
    "Countdown",
    "DigitDrawings",
    "DigitScorer",
    "PictureDrills",
    "PictureQuestions",
    "PythonFunctions",
    "Sudoku",
    "WordProblems",
]
