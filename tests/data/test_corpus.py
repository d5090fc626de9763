"""Raw text on its way to token ids: every source, resumed, never changed behind a reader's back."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import gzip
import itertools
import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from data import corpus, toy
from data.corpus import TokenFile, read_blocks, tokenised
from data.raw_text import Source
from phases.exits import end
from target.model import Target
from tests.helpers.commands import TWO, finish, pipe, start, write_jsonl
from tests.helpers.tiny import EOS
from trainer.errors import RunFault, UserError
from trainer.processes import Spread

TEXTS = [f"Document {i} says {'so ' * (i % 5)}and ends." for i in range(30)]


@pytest.fixture
def target(tiny_target, monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK_DOCUMENTS", 4)
    return tiny_target("llama")


@pytest.fixture
def raw(tmp_path):
    return str(write_jsonl(tmp_path / "raw.jsonl", [{"text": text} for text in TEXTS]))


def encoded(target, texts=TEXTS):
    return [[*target.tokenizer(text).input_ids, EOS] for text in texts]


def documents_of(file: TokenFile) -> list[list[int]]:
    return [part.tolist() for part in np.split(file.tokens, file.ends[:-1].astype(int))]


def all_of(source, target, cache, num_tokens=10**6):
    return tokenised(Source.parse(source), target, num_tokens, cache)


def test_every_document_is_the_targets_own_tokens_and_ends_in_eos(target, raw, tmp_path):
    file = all_of(raw, target, tmp_path)
    assert documents_of(file) == encoded(target)
    assert file.tokens.dtype == np.uint32
    assert (file.num_documents, file.num_tokens) == (30, sum(map(len, encoded(target))))


def test_an_eos_of_the_tokenizers_own_is_not_doubled(target, tmp_path):
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"text": "Done.<|endoftext|>"}])
    assert all_of(str(raw), target, tmp_path).tokens.tolist().count(EOS) == 1


def test_a_block_is_on_the_disk_before_its_line_says_so(target, raw, tmp_path, syncs):
    file = all_of(raw, target, tmp_path)
    (folder,) = (tmp_path / "corpus").iterdir()
    blocks = read_blocks(folder)[1:]
    assert len(blocks) == 8
    sizes = {"tokens.bin": 0, "ends.bin": 0}
    seen = []
    for sync in syncs:
        if sync.path.name in sizes:
            sizes[sync.path.name] = sync.size
        elif sync.path == folder / "blocks.jsonl":
            seen.append((sync.size, sizes["tokens.bin"] // 4, sizes["ends.bin"] // 8))
    lines = (folder / "blocks.jsonl").read_text().splitlines(keepends=True)
    ends = itertools.accumulate(map(len, lines))
    expected = [(e, b["tokens"], b["kept"]) for e, b in zip(ends, blocks, strict=True)]
    assert seen == expected
    assert seen[-1][1] == file.num_tokens


@pytest.mark.parametrize("kind", ["txt", "json", "csv", "parquet", "jsonl.gz"])
def test_every_kind_of_file_gives_the_same_tokens(kind, target, tmp_path):
    texts = TEXTS[:1] if kind == "txt" else TEXTS
    path = tmp_path / f"raw.{kind}"
    rows = [{"text": text} for text in texts]
    if kind == "txt":
        path.write_text(texts[0])
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["text"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(lines.encode()))
    assert documents_of(all_of(str(path), target, tmp_path)) == encoded(target, texts)


def test_a_folder_is_all_its_files_in_order(target, tmp_path):
    for name, text in (("b", "second"), ("a", "first"), ("sub/c", "third\n\nand more")):
        path = tmp_path / "folder" / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = documents_of(all_of(str(tmp_path / "folder"), target, tmp_path))
    assert found == encoded(target, ["first", "second", "third\n\nand more"])


def test_a_column_is_named_or_one_of_the_usual(target, tmp_path):
    rows = [{"content": text, "other": text.upper()} for text in TEXTS]
    raw = write_jsonl(tmp_path / "raw.jsonl", rows)
    assert documents_of(all_of(str(raw), target, tmp_path)) == encoded(target)
    upper = all_of(f"{raw}#column=other", target, tmp_path)
    assert documents_of(upper) == encoded(target, [text.upper() for text in TEXTS])


def test_empty_documents_are_left_out(target, tmp_path):
    rows = [{"text": text} for text in ["one", "", "  \n", None, "two", "three"]]
    raw = write_jsonl(tmp_path / "raw.jsonl", rows)
    assert documents_of(all_of(str(raw), target, tmp_path)) == encoded(
        target, ["one", "two", "three"]
    )


@pytest.mark.parametrize("domain", toy.DOMAINS)
def test_the_toys_raw_text_is_its_training_split(domain, target, tmp_path):
    file = all_of(f"toy:{domain}", target, tmp_path, num_tokens=2000)
    stream = toy.documents(domain, "train")
    assert documents_of(file) == encoded(
        target, [next(stream).text for _ in range(file.num_documents)]
    )
    assert file.num_tokens >= 2000


def test_no_more_is_read_than_asked_for_and_a_longer_budget_goes_on(target, raw, tmp_path):
    small = all_of(raw, target, tmp_path, num_tokens=100)
    assert 100 <= small.num_tokens < 100 + 4 * 60
    whole = all_of(raw, target, tmp_path)
    assert documents_of(whole) == encoded(target)
    again = all_of(raw, target, tmp_path, num_tokens=100)
    assert again.tokens.tolist() == small.tokens.tolist()
    assert again.fingerprint == small.fingerprint != whole.fingerprint
    assert len(list((tmp_path / "corpus").iterdir())) == 1


def test_piped_it_tells_how_far_it_is(target, raw, tmp_path, capsys):
    file = all_of(raw, target, tmp_path, num_tokens=400)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokenise")]
    assert 2 <= len(lines) <= 10
    assert lines[-1] == f"tokenise {raw}: {file.num_tokens} of 400 tokens"


def test_written_once_it_is_not_read_again(target, raw, tmp_path, monkeypatch):
    whole = all_of(raw, target, tmp_path)
    monkeypatch.setattr(Source, "texts", lambda *_: pytest.fail("read again"))
    assert all_of(raw, target, tmp_path).fingerprint == whole.fingerprint


@pytest.mark.parametrize("torn", ["nothing", "tokens", "line"])
def test_a_killed_tokenisation_goes_on_with_the_same_tokens(
    torn, target, raw, tmp_path, monkeypatch
):
    expected = all_of(raw, target, tmp_path / "straight")

    class Killed(BaseException):
        pass

    plain, writes = corpus._write, []

    def write(path, content):
        writes.append(path.name)
        if writes.count("blocks.jsonl") == 3:
            if torn == path.name.partition(".")[0] or torn == "line":
                plain(path, content[: len(content) // 2])
            raise Killed
        plain(path, content)
        if torn == "tokens" and writes.count("blocks.jsonl") == 2 and path.name == "blocks.jsonl":
            plain(path.with_name("tokens.bin"), b"123")

    monkeypatch.setattr(corpus, "_write", write)
    with pytest.raises(Killed):
        all_of(raw, target, tmp_path / "killed")
    monkeypatch.setattr(corpus, "_write", plain)
    (folder,) = (tmp_path / "killed" / "corpus").iterdir()
    assert len(read_blocks(folder)) == 3  # the one without text, and two
    found = all_of(raw, target, tmp_path / "killed")
    assert found.fingerprint == expected.fingerprint
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert documents_of(found) == encoded(target)


def test_other_text_or_another_tokenizer_is_another_file(target, raw, tmp_path):
    first = all_of(raw, target, tmp_path)
    write_jsonl(tmp_path / "raw.jsonl", [{"text": text + "!"} for text in TEXTS])
    assert all_of(raw, target, tmp_path).fingerprint != first.fingerprint
    fingerprint = target.fingerprint | {"tokenizer": "another"}
    all_of(raw, dataclasses.replace(target, fingerprint=fingerprint), tmp_path)
    assert len(list((tmp_path / "corpus").iterdir())) == 3


def test_a_row_knows_its_documents_and_positions(target, tmp_path):
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"text": text} for text in ("abc", "de", "fghi")])
    file = all_of(str(raw), target, tmp_path)  # abc. de. fghi. -> 4 + 3 + 5 tokens
    ids, positions, documents = file.row(0, 6)
    assert ids.tolist() == file.tokens[:6].tolist()
    assert positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert documents.tolist() == [0, 0, 0, 0, 1, 1]
    _, positions, documents = file.row(1, 6)  # begins with the last token of the second
    assert positions.tolist() == [0, 0, 1, 2, 3, 4]
    assert documents.tolist() == [0, 1, 1, 1, 1, 1]


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("toy", "of the toy there are toy:code, toy:prose, toy:math"),
        ("toy:cod", "unknown corpus 'toy:cod'"),
        ("toy:code#split=train", "split does not apply to toy:code"),
        ("a/b#colum=text", "unknown option 'colum'; did you mean 'column'?"),
        ("nothing.jsonl", "corpus file nothing.jsonl does not exist"),
        ("no/such/folder", "corpus no/such/folder does not exist"),
        ("a" * 300 + ".txt", "corpus file aaa.* does not exist"),
        ("{tmp}#split=train", "split does not apply"),
    ],
)
def test_a_wrong_source_is_named_before_anything_is_read(name, says, tmp_path):
    with pytest.raises(UserError, match=says.replace("?", r"\?")):
        Source.parse(name.format(tmp=tmp_path))


@pytest.mark.parametrize(
    ("content", "option", "says"),
    [
        ('{"text": "a"}\n{"text": 3}\n', "", "cannot|must hold text"),
        ('{"body": "a"}\n', "", "no column 'text or content or code'; columns: body"),
        ('{"text": "a"}\n', "#column=body", "no column 'body'; columns: text"),
        ("not json\n", "", "cannot be opened"),
    ],
)
def test_rows_that_are_no_text_are_named(content, option, says, target, tmp_path):
    (tmp_path / "raw.jsonl").write_text(content)
    with pytest.raises((UserError, RunFault), match=says):
        all_of(f"{tmp_path / 'raw.jsonl'}{option}", target, tmp_path)


def test_a_corpus_is_not_read_from_a_pipe(tmp_path):
    name = str(pipe(tmp_path / "raw.txt"))
    with pytest.raises(UserError, match=r"corpus file .* is a pipe: name a regular file"):
        Source.parse(name).identity()


def test_a_folder_without_text_or_with_several_kinds(target, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UserError, match=r"holds no file of \.txt"):
        all_of(str(folder), target, tmp_path)
    (folder / "a.txt").write_text("a")
    write_jsonl(folder / "b.jsonl", [{"text": "b"}])
    with pytest.raises(UserError, match="of one kind"):
        all_of(str(folder), target, tmp_path)


def test_a_hub_data_set_that_cannot_be_reached_is_one_line(target, tmp_path):
    """Tests run offline."""
    with pytest.raises(UserError, match="'someone/something' is neither toy:<domain>, nor a file"):
        all_of("someone/something", target, tmp_path)


def test_a_hub_data_set_stays_at_its_first_commit(target, tmp_path, monkeypatch):
    """Its text may change between two commands; a file must not hold both."""
    import datasets

    commits, opened = iter(["one", "two"]), []

    class Info:
        def dataset_info(self, name):
            return type("Found", (), {"sha": next(commits)})

    def load(name, config, *, split, streaming, revision):
        opened.append((name, config, split, streaming, revision))
        return datasets.Dataset.from_list([{"text": t} for t in TEXTS]).to_iterable_dataset()

    monkeypatch.setattr(corpus, "HfApi", Info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = "someone/something#config=small&split=part"
    all_of(source, target, tmp_path, num_tokens=100)
    assert documents_of(all_of(source, target, tmp_path)) == encoded(target)
    assert opened == [("someone/something", "small", "part", True, "one")] * 2
    all_of("someone/something#revision=fixed", target, tmp_path)
    assert opened[-1] == ("someone/something", None, "train", True, "fixed")


def test_two_commands_do_not_write_the_same_file(target, raw, tmp_path):
    all_of(raw, target, tmp_path, num_tokens=100)
    (folder,) = (tmp_path / "corpus").iterdir()
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is being written by another process"):
            all_of(raw, target, tmp_path)


def test_a_disk_that_is_too_small_is_known_before(target, raw, tmp_path, monkeypatch, capsys):
    usage = type("Usage", (), {"free": 300})
    monkeypatch.setattr(corpus.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"needs about 0\.004 MB"):
        all_of(raw, target, tmp_path, num_tokens=1000)
    assert "up to 1000 more tokens" in capsys.readouterr().out


def test_a_tokenizer_wider_than_the_target_is_refused(raw, tiny_folder, tmp_path):
    narrow = Target.load(str(tiny_folder("llama", vocab_size=90)))
    with pytest.raises(UserError, match=r"CompatibilityError.* the target scores ids below 90"):
        all_of(raw, narrow, tmp_path)


# --- what was damaged since -------------------------------------------------------------------


def corpus_folder(cache):
    (folder,) = (cache / "corpus").iterdir()
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite_block(folder, **changes):
    """The second of the blocks."""
    lines = (folder / "blocks.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | changes)
    (folder / "blocks.jsonl").write_text("".join(line + "\n" for line in lines))


DAMAGES = {
    "a byte of tokens": lambda folder: flip(folder / "tokens.bin"),
    "a byte of ends": lambda folder: flip(folder / "ends.bin"),
    "tokens cut": lambda folder: os.truncate(folder / "tokens.bin", 100),
    "ends cut": lambda folder: os.truncate(folder / "ends.bin", 9),
    "tokens gone": lambda folder: (folder / "tokens.bin").unlink(),
    "zeros": lambda folder: (folder / "tokens.bin").write_bytes(
        bytes((folder / "tokens.bin").stat().st_size)
    ),
    "a checksum": lambda folder: rewrite_block(folder, sha256="0" * 64),
    "a count of documents": lambda folder: rewrite_block(folder, documents=3),
    "an early end": lambda folder: rewrite_block(folder, last=True),
    "a block without counts": lambda folder: rewrite_block(folder, tokens=None),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("more", [False, True])
def test_a_damaged_corpus_is_refused_and_the_remedy_works(target, raw, tmp_path, damage, more):
    """`more`: when more tokens are wanted than there are, which once filled it up with zeros."""
    expected = all_of(raw, target, tmp_path, 200 if more else 10**6).fingerprint
    folder = corpus_folder(tmp_path)
    DAMAGES[damage](folder)
    with pytest.raises(UserError, match=rf"corpus {folder} is damaged \(.*\): delete this folder"):
        all_of(raw, target, tmp_path)
    shutil.rmtree(folder)
    assert all_of(raw, target, tmp_path, 200 if more else 10**6).fingerprint == expected


def test_hashes_are_compared_once_for_each_state_of_the_files(target, raw, tmp_path, monkeypatch):
    all_of(raw, target, tmp_path)
    compared, plain = [], corpus._chained

    def chained(*parts):
        compared.append(parts)
        return plain(*parts)

    monkeypatch.setattr(corpus, "_chained", chained)
    all_of(raw, target, tmp_path)
    first = len(compared)
    assert first == len(read_blocks(corpus_folder(tmp_path))) - 1
    all_of(raw, target, tmp_path)
    assert len(compared) == first
    os.utime(corpus_folder(tmp_path) / "tokens.bin", ns=(1, 1))
    all_of(raw, target, tmp_path)
    assert len(compared) == 2 * first


def test_other_processes_only_look_at_the_sizes(target, raw, tmp_path, monkeypatch):
    all_of(raw, target, tmp_path)
    monkeypatch.setattr(corpus, "_chained", lambda *_: pytest.fail("compared twice"))
    source = Source.parse(raw)
    tokenised(source, target, 10**6, tmp_path, is_main=False)
    os.truncate(corpus_folder(tmp_path) / "tokens.bin", 100)
    with pytest.raises(UserError, match=r"tokens.bin has 100 bytes, \d+ were written"):
        tokenised(source, target, 10**6, tmp_path, is_main=False)


# --- several processes ------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_write_what_one_does(tiny_folder, tmp_path):
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps({"text": "ab ~" * n}) + "\n" for n in range(1, 40)))
    words = [str(tiny_folder("llama")), str(raw), str(tmp_path)]
    code, _, err = finish(start(*TWO, "-m", "tests.data.test_corpus", *words))
    assert code == 0, err[-3000:]


@pytest.mark.slow
def test_a_fault_of_the_first_process_is_shown_and_ends_the_others():
    """While the second has a result that nobody asks for any more."""
    code, _, err = finish(start(*TWO, "-m", "tests.data.test_corpus"))
    assert code != 0
    assert "ValueError: no such text" in err


def fail(words: list[str]) -> int:
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    def compute(number: int) -> int:
        if first and number == 2:
            raise ValueError("no such text")
        return number

    spread = Spread(compute)
    if first:
        with spread:
            list(spread.each(range(4)))
    else:
        spread.help()
    return 0


def write(words: list[str]) -> int:
    """One of two processes: some blocks, more of them, all, none that is missing; an error."""
    folder, raw, there = words
    corpus.BLOCK_DOCUMENTS = 2
    target, source = Target.load(folder), Source.parse(raw)
    files = Path(there, f"alone{os.environ['RANK']}"), Path(there, "both")
    tokenised(source, target, 10**6, files[0])  # no group yet
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    made = []
    encode = corpus._encoded
    corpus._encoded = lambda *given: made.append(given) or encode(*given)
    for count in (20, 300, 10**6, 10**6):
        tokenised(source, target, count, files[1], is_main=first, barrier=dist.barrier)
    alone, both = ({p.name: p.read_bytes() for p in corpus_folder(one).iterdir()} for one in files)
    assert len(json.loads(both["blocks.jsonl"].splitlines()[-1])) == 5
    for name in ("tokens.bin", "ends.bin", "blocks.jsonl"):
        assert both[name] == alone[name], name
    assert 8 < len(made) < 14  # of 20 blocks, some of which came too late for a smaller number
    target.model.resize_token_embeddings(90)
    narrow = Target(target.model, target.tokenizer, "narrow", target.fingerprint, target.eos_ids)
    refused = pytest.raises(UserError, match="CompatibilityError") if first else nullcontext()
    with refused:  # the other does not wait for more
        tokenised(source, narrow, 10**6, Path(there, "narrow"), is_main=first)
    return 0


if __name__ == "__main__":
    end(write if len(sys.argv) > 1 else fail)
