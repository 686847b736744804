"""Tasks of the embedded models, with problems drawn rather than stored, and their tokenizer."""

from lit_dlm.toy.addition import Addition as Addition
from lit_dlm.toy.countdown import Countdown as Countdown
from lit_dlm.toy.pictures import (
    DigitDrawings as DigitDrawings,
    DigitScorer as DigitScorer,
    PictureDrills as PictureDrills,
    PictureQuestions as PictureQuestions,
)
from lit_dlm.toy.python_functions import (
    PythonFunctions as PythonFunctions,
    WideFunctions as WideFunctions,
)
from lit_dlm.toy.sudoku import Sudoku as Sudoku
from lit_dlm.toy.word_problems import WordProblems as WordProblems
