"""Prompts of a known number of tokens, made of words that are one token each.

Whether a word is one token is asked of the server's own `/tokenize` where it has one, else of a local
`tokenizer.json`; with neither, words are taken for tokens. How many tokens a prompt really had is always reported from
the server's usage, never from here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from loadtest.closed_loop import PlannedRequest, open_session
from loadtest.scenarios import Shape
from loadtest.target import Target

CountTokens = Callable[[str], Awaitable[int]]

# Common English words. Nearly all of them are one token in any vocabulary; those that are not are left out.
CANDIDATES = """
about above across after again against age air all almost along already also although always am among amount and
animal another answer any appear apple area around art ask away back bad base because become bed been before began
begin behind being believe below best better between big bird black blood blue board boat body book both bottom box
boy break bring brother brought brown build building built business but buy call came can car care carry case catch
cause center century certain chance change check child children choose church circle city class clean clear close
cold color come common community company complete contain control cook cool corner correct cost could country course
cover cross crowd cry culture current cut dark data day dead deal death decide deep degree describe design develop
did difference different difficult direct discover do doctor does dog done door down draw dream dress drive drop dry
during each ear early earth east easy eat edge effect egg eight either end energy engine enough enter equal even
evening event ever every example experience explain eye face fact fall family famous far farm fast father favor fear
feel feet felt few field fight figure fill final find fine finger finish fire first fish fit five floor flow flower
fly follow food foot for force foreign forest form forward found four free fresh friend from front fruit full fun
game garden gas gave general gentle get girl give glass go gold gone good got government grand grass great green
grew ground group grow guess had hair half hand happen happy hard has have he head health hear heart heat heavy held
help her here high hill him his history hit hold home hope horse hot hour house how human hundred ice idea if image
important inch increase industry inside interest into iron is island it its job join jump just keep kept key kind
king knew know knowledge lady lake land language large last late laugh law lay lead learn least leave left leg less
let letter level lie life light like line list listen little live local long look lost lot love low machine made
main major make man many map mark market matter may me mean measure meet member men might mile military milk mind
mine minute miss modern moment money month moon more morning most mother mountain mouth move much music must my name
nation natural nature near necessary need never new next night nine no noise none north nose not note nothing notice
now number object of off offer office often oil old on once one only open or order other our out outside over own
page paper part party pass past path pay people perhaps period person phrase picture piece place plain plan plane
plant play please point policy poor population position possible pound power practice present press pretty problem
process produce product public pull purpose push put question quick quiet quite race radio rain raise ran reach read
ready real reason receive record red region remember rest result return rich ride right ring rise river road rock
roll room root rose round rule run safe said sail salt same sand sat save saw say school science sea season seat
second section see seed seem self sell send sense sent serve set seven several shall shape share she ship short
should show side sight sign silver similar simple since sing single sister sit six size skin sky sleep slow small
snow so social soft soil soldier some son song soon sound south space speak special speed spend spoke spot spread
spring square stand star start state station stay step still stone stood stop store story strange street strong
student study such summer sun support sure surface surprise system table tail take talk tall teach team tell ten
term test than that the their them then there these they thick thin thing think third this those though thought
thousand three through time tiny to today together told tone too took top total touch toward town track trade train
travel tree tried true try turn two type under unit until up us use usual valley value very view village visit voice
wait walk wall want war warm was watch water wave way we wear weather week weight well went were west what wheel when
where which while white who whole why wide wife wild will win wind window winter wish with woman wonder wood word
work world would write wrong year yellow yes yet you young your
""".split()  # noqa: SIM905 (a list literal of 700 words is not easier to read)


def default_num_requests(shape: Shape, concurrency: int) -> int:
    """Of the mix itself, else twice the clients; 32 prompts of 1,024 tokens are already much, so one wave suffices."""
    if shape.requests is not None:
        return shape.requests
    if shape.prompt_tokens.high >= 1024 and concurrency >= 32:
        return concurrency
    return max(8, 2 * concurrency)


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Writes prompts. `source` says who vouches that each word is one token: `server`, `tokenizer` or `words`."""

    words: tuple[str, ...]
    source: str

    def text(self, rng: random.Random, num_tokens: int) -> str:
        return "".join(" " + word for word in rng.choices(self.words, k=num_tokens))

    def plan(self, shape: Shape, num_requests: int, seed: str) -> list[PlannedRequest]:
        """The requests of one run; another seed gives other prompts, also another shared prefix."""
        rng = random.Random(seed)
        prefix = self.text(rng, shape.shared_tokens)
        return [self._request(shape, prefix, rng) for _ in range(num_requests)]

    def _request(self, shape: Shape, prefix: str, rng: random.Random) -> PlannedRequest:
        num_tokens = shape.prompt_tokens.draw(rng)
        if shape.copied_tokens:
            passage = self.text(rng, shape.copied_tokens)
            copy = "".join(
                " " + word for word in passage.split()[: num_tokens - shape.copied_tokens]
            )
            return PlannedRequest(passage + copy, shape.output_tokens.draw(rng))
        own = self.text(rng, num_tokens - shape.shared_tokens)
        return PlannedRequest(prefix + own, shape.output_tokens.draw(rng))

    def plan_warm_up(self, num_requests: int, seed: str) -> list[PlannedRequest]:
        """Short requests that share nothing with the measured ones."""
        rng = random.Random(f"warm-up-{seed}")
        return [PlannedRequest(self.text(rng, 32), 16) for _ in range(num_requests)]


async def prompt_maker_for(target: Target, tokenizer_path: str | None) -> PromptMaker:
    """A local tokenizer if one is named, else the server's `/tokenize`, else words taken for tokens."""
    if tokenizer_path is not None:
        return PromptMaker(words_of_tokenizer(tokenizer_path), "tokenizer")
    async with open_session() as session:

        async def count_tokens(text: str) -> int:
            return await _count_on_server(session, target, text)

        try:
            words = await one_token_words(CANDIDATES, count_tokens)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
            words = []
    if len(words) < 100:
        return PromptMaker(tuple(CANDIDATES), "words")
    return PromptMaker(tuple(words), "server")


async def one_token_words(words: Sequence[str], count_tokens: CountTokens) -> list[str]:
    """The words that are one token each, with a space before them.

    Asks for groups and halves those that have too many tokens, so that a usual vocabulary needs few questions.
    """
    if not words:
        return []
    num_tokens = await count_tokens("".join(" " + word for word in words))
    if num_tokens == len(words):
        return list(words)
    if len(words) == 1 or num_tokens < len(words):
        return []  # fewer tokens than words: this vocabulary joins words, and nothing can be said of them
    middle = len(words) // 2
    return [
        *await one_token_words(words[:middle], count_tokens),
        *await one_token_words(words[middle:], count_tokens),
    ]


async def _count_on_server(session: aiohttp.ClientSession, target: Target, text: str) -> int:
    """Raises `ValueError` where the server has no such route."""
    body: dict[str, Any] = {"prompt": text, "add_special_tokens": False}
    if target.model is not None:
        body["model"] = target.model
    async with (
        asyncio.timeout(30),
        session.post(
            target.url + "/tokenize", data=orjson.dumps(body), headers=target.headers
        ) as response,
    ):
        if response.status != 200:
            raise ValueError(f"/tokenize answered {response.status}")
        answer = await response.json(content_type=None)
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list):
        raise ValueError("/tokenize answered without tokens")
    return len(tokens)


def words_of_tokenizer(path: str) -> tuple[str, ...]:
    """All plain lower-case words of a byte-level vocabulary that are one token behind a space, else candidates."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SystemExit("--tokenizer needs the package tokenizers.") from None
    tokenizer = Tokenizer.from_file(path)

    def is_one_token(word: str) -> bool:
        return len(tokenizer.encode(" " + word, add_special_tokens=False).ids) == 1

    marked = (token[1:] for token in tokenizer.get_vocab() if token[:1] in ("\u0120", "\u2581"))
    plain = {word for word in marked if len(word) > 3 and word.isascii() and word.isalpha()}
    words = sorted(word for word in plain if word.islower() and is_one_token(word))
    if len(words) < 100:
        words = [word for word in CANDIDATES if is_one_token(word)]
    if not words:
        raise SystemExit(f"{path} has no words that are one token.")
    return tuple(words)
