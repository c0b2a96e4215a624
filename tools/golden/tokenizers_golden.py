# SPDX-License-Identifier: Apache-2.0
"""Writes tokenizer/testdata/golden: small tokenizers, one a feature, with texts and the reference's ids.

Run through `make golden`. Each is trained on the text below by the PyPI package tokenizers, whose version stands in
requirements.txt, and written by it; the ids are what it gives. NAME.json is the tokenizer, NAME.jsonl its cases:
{"text": …, "special": whether special tokens are added, "ids": […]}.
"""
import base64
import json
import pathlib
import random
import re
import struct
import sys
import zlib

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = """
The router reads the prompt, turns it into tokens and tokens into blocks, and asks which worker has them already.
A worker that holds the first hundred blocks of a prompt computes only what is left; the others compute it all.
If nothing is known, the least loaded worker is chosen. It isn't magic: they'll see it, we've measured it, I'm sure.
func (r *Router) BestWorker(ctx context.Context, req Request) (Decision, error) {
\treturn r.pool(req.Model).decide(ctx, req)
}
for i in range(10):
    print("block", i, {"overlap": 0.75, "tokens": [1, 23, 456, 7890]})
Der Verteiler liest die Anfrage, größer oder kleiner, und wählt über Nacht den nächsten freien Rechner aus.
Le routeur choisit l'ouvrier dont la mémoire contient déjà le début de la requête; ça va très vite, même à minuit.
Маршрутизатор выбирает сервер, у которого уже есть нужные блоки, и отправляет запрос ему.
路由器选择已经缓存了前缀的节点，所以第一个词元来得更快。计算一次，使用多次。
ルーターは先頭のブロックを持つワーカーを選びます。速いです。カタカナとひらがな。
라우터는 접두사를 가진 작업자를 선택합니다.
TTFT 0.25 s, 1234567 tokens, 99.9 % of 2026-11-21; HTTP/2 200 OK, https://example.com/v1/chat?x=1&y=2#z
""".strip()

TEXTS = [
    "", " ", "  ", "\n", "\t\n \n", "a", " a", "a ", "Hello world", "Hello  world\n\n  again", "it's IT'S I'LL they've", "aB'sC 'ſ", "x'",
    "1234567 12 1", "１２３４５ ٣٤ ¾", "naïve café", "e\u0301z \u0301", "e\u0328\u0301 A\u030a", "中文 路由器选择", "カタカナとひらがな中", "한국어 \u1112\u1161\u11ab", "Über größer",
    "🚀👩‍💻 ok", "\u00a0x\u2003y\u3000z", "\u0085a", "a\x00b\x7f", "<s>hi", " hi", "a</s> b", "x<s></s>", "  lead", "▁already▁", "<a>b", "x<a>bc", "b<a>", "<a>", "word<w>word <w> x", "x  <m>  y", "x\n<m>\n\ny<m><m>",
    "éz", "e\u0301z", "éze\u0301z", "\U0001e4ec\u0301a\u0301", "ǅungla ʰª ａＢ", "fn(x)/*c*/ //\n\n", "a\r\nb\r\r\nc", "...!!!\n", "(\u0301a", "http://x.y/z?q=1", "<|im_start|>user\nhi<|im_end|>\n", "<|im_st", "unk☃☃☃ ☃unk",
    "The router reads the prompt, turns it into tokens and tokens into blocks.", "func main() {\n\treturn \"x\"\n}\n", "HelloWorld HTTPServer iOS", "x" * 70, "ab" * 40, " " * 40, "'" * 20, "\u0301" * 12,
]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CL100K.replace("{1,3}", "")
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LEAD = r"[^\r\n\p{L}\p{N}]?"
O200K = f"{LEAD}{UPPER}*{LOWER}+{SUFFIX}|{LEAD}{UPPER}+{LOWER}*{SUFFIX}|\\p{{N}}{{1,3}}|{REST}"
TEKKEN = f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\\p{{N}}|{REST}"
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
HAN = r"[\p{Han}]+"
NO_HAN = r"&&[^\p{Han}]]"
KUPPER, KLOWER = UPPER[:-1] + NO_HAN, LOWER[:-1] + NO_HAN
KIMI = f"{HAN}|{LEAD}{KUPPER}*{KLOWER}+{SUFFIX}|{LEAD}{KUPPER}+{KLOWER}*{SUFFIX}|\\p{{N}}{{1,3}}| ?[^\\s\\p{{L}}\\p{{N}}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

# Steps behind ByteLevel, as Falcon has them, see a character for each byte.
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"


def behind_bytes(before, behind):
    t = byte_level(before + [split(GPT2)])
    t.pre_tokenizer = pre_tokenizers.Sequence(before + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)] + behind)
    return t


def framed(t, post):
    t.post_processor = post
    return t


# What a corpus without rare bytes teaches: line ends and wide spaces side by side.
GAPS = CORPUS.splitlines(True) + ["a\n\n\n\u3000\u3000\u3000\n", "\u3000\u3000\n\n", "éé中中中", "x\n\n"] * 20
GAPS_TEXTS = [
    "\u3000\u3000\u3000\n\x0b\n", "\n\x0b\n\u3000\x01\u3000\u3000\u3000\u3000", "中" * 6 + "\x00" * 3 + "中" * 6, "é\U000e0100é\U0010ffffééééééé", "\x0b", "a\x0b\x0c\x1c\n\n",
    "中\u0c85中\u0c85中中中中\u0c85" * 9, "\x01\x02\u3000\x03" * 12, "!\U000f0000\U000f0000!!" * 5,
]

UNICODE_TEXTS = [
    "ﬁ ﷺ ㋿ ½ Ⅷ ｱﾊﾟ ①", "İSTANBUL ΑΣ ǅ Ʞ Ა ᏸ", "  lead and trail \u3000", "Å e\u0301\u0327 \u1e9b\u0323", "\U00010d50\U00016ea0\ua7da", "a\u1abf\u0898b", "½²³ ９ ٣ ¹a¼", "²b³ 1a22b333c4444d55555 1000000", "٪ ؟ 。！？ ،a، ।b", "…x..y!!z?",
    "\u166d a\u2e43b \u061d", "(a|b) (c,d). | e", "x\u00b2y é¼ \u00a0\u00b9", "a\u0301\u0301\u0301 \uac01\u11a8 \u1100\u1161\u11a8", "\u0344\u0958\u2126\u212b\ufb1d", "\U00011de0 \U00016ff4 12", "中é¾é", "éeée", "a e b",
]

HAN_TEXTS = [
    "中文abc中", "a中B文c", "々〇〡中 々", " 中", "中'sA's", "1〇2中", "!⺀x⼀", "ｱ中カﾀ", "\u0301中\u0301a", "\U00020000a\U0002ebf0", "中\n文 \n", "ABC中DEf", "Ａ中ａ", "中ʰªa", "?中\r\n/中", "x-z中&[^", "aeiou xyz 中12中345",
]


# Unicode's normal forms have no bound on the marks behind a character, and order marks by their classes.
MARK_TEXTS = [
    "\u0301" * 31, "a" + "\u0301" * 31, "e" + "\u0323\u0301" * 20 + "z", "a" + "\u0301" * 40 + "\u0323" * 40 + "e\u0301", "\u302e\u302d", "\u1112\u1161" + "\u0301" * 33 + "\u11ab",
]


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def byte_level(pre, norm=None, size=400, corpus=None, model=None, alphabet=None):
    t = Tokenizer(model or models.BPE())
    steps = pre if isinstance(pre, list) else [pre]
    t.pre_tokenizer = pre_tokenizers.Sequence(steps + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if norm:
        t.normalizer = norm
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        corpus or CORPUS.splitlines(True),
        trainers.BpeTrainer(
            vocab_size=size, show_progress=False, special_tokens=[model.unk_token] if model else [],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet,
        ),
    )
    t.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return t


def sentencepiece(norm=None, pre=None, fallback=True, fuse=True, size=600):
    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=fallback, fuse_unk=fuse))
    if norm:
        t.normalizer = norm
    if pre:
        t.pre_tokenizer = pre
    special = ["<unk>", "<s>", "</s>"] + ([f"<0x{b:02X}>" for b in range(256)] if fallback else [])
    # Words are learnt without a pre-tokenizer's help from short stretches.
    words = [w for w in CORPUS.replace("\n", " ").replace(" ", " \x00").split("\x00") if w]
    t.train_from_iterator(words, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False))
    spec = json.loads(t.to_str())
    # Byte tokens belong to the model, not to what is found in the text.
    spec["added_tokens"] = [a for a in spec["added_tokens"] if not a["content"].startswith("<0x")]
    t = Tokenizer.from_str(json.dumps(spec))
    t.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", t.token_to_id("<s>"))]
    )
    return t


NEW = ["falcon", "falcon3", "bloom", "starcoder", "neox", "norm-nfd", "norm-nfkc-strip", "norm-nfkd-strip", "punctuation", "bytelevel-digit-runs"]


def all_tokenizers():
    out = {
        "bytelevel-gpt2": byte_level(split(GPT2)),
        "bytelevel-cl100k": byte_level(split(CL100K)),
        "bytelevel-qwen2-nfc": byte_level(split(QWEN2), normalizers.NFC()),
        "bytelevel-qwen35": byte_level(split(QWEN35)),
        "bytelevel-o200k": byte_level(split(O200K)),
        "bytelevel-tekken": byte_level(split(TEKKEN)),
        "bytelevel-deepseek": byte_level([split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK)]),
        "bytelevel-kimi": byte_level(split(KIMI)),
        "falcon": behind_bytes([pre_tokenizers.Punctuation("contiguous")], [pre_tokenizers.Digits(False), split("[0-9][0-9][0-9]")]),
        "falcon3": behind_bytes([pre_tokenizers.Punctuation("contiguous")], [pre_tokenizers.Digits(True)]),
        "bloom": byte_level(split(BLOOM)),
        "starcoder": framed(byte_level([pre_tokenizers.Digits(True), split(GPT2)]), processors.RobertaProcessing(("<|im_end|>", 401), ("<|im_start|>", 400))),
        "neox": framed(byte_level(split(GPT2), normalizers.NFC()), processors.BertProcessing(("<|im_end|>", 401), ("<|im_start|>", 400))),
        "norm-nfd": byte_level(split(GPT2), normalizers.NFD()),
        "norm-nfkc-strip": byte_level(split(GPT2), normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(left=True, right=False)])),
        "norm-nfkd-strip": byte_level(split(CL100K), normalizers.Sequence([normalizers.NFKD(), normalizers.Strip()])),
        "punctuation": byte_level([pre_tokenizers.Punctuation("merged_with_next"), pre_tokenizers.Punctuation("isolated"), pre_tokenizers.CharDelimiterSplit("e")]),
        # Most bytes are no token: what stands on both sides of one merges, or an unknown token stands for several.
        "bytelevel-gaps": byte_level(split(GPT2), corpus=GAPS, size=300, alphabet=[]),
        "bytelevel-gaps-unk": byte_level(split(GPT2), corpus=GAPS, size=300, alphabet=[], model=models.BPE(unk_token="<unk>", fuse_unk=True)),
        "bytelevel-digits": byte_level([pre_tokenizers.Digits(individual_digits=True), split(GPT2)]),
        "bytelevel-digit-runs": byte_level([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Punctuation()]),
        "bytelevel-whitespace": byte_level([pre_tokenizers.Whitespace()]),
        "bytelevel-blanks": byte_level([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("merged_with_previous")]),
        "bytelevel-regex": byte_level([split(r"\p{Lu}?\p{Ll}+|\p{N}+(?=\s)|\s+(?!\S)", "merged_with_next"), split(r"[aeiou]", "removed")]),
        "bytelevel-contiguous": byte_level([split(r"[\p{L}\s]", "contiguous"), split("t", "merged_with_previous", True)]),
        "metaspace-first": sentencepiece(pre=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        "metaspace-always-split": sentencepiece(pre=pre_tokenizers.Metaspace(prepend_scheme="always", split=True)),
        "metaspace-never": sentencepiece(pre=pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
        "prepend-replace": sentencepiece(norm=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
        "replace-only": sentencepiece(norm=normalizers.Replace(" ", "▁")),
        "unk-fused": sentencepiece(pre=pre_tokenizers.Metaspace(), fallback=False, fuse=True),
        "unk-single": sentencepiece(norm=normalizers.Replace(Regex(r"\s+"), "▁"), fallback=False, fuse=False),
    }
    added = byte_level(split(CL100K), normalizers.NFC())
    added.add_tokens([
        AddedToken("<m>", lstrip=True, rstrip=True), AddedToken("<w>", single_word=True), "<a>", "<a>b", "b<",
        AddedToken("éz", normalized=True), AddedToken("<|n|>", normalized=False),
    ])
    out["added-flags"] = added
    flags = byte_level(split(QWEN2))
    flags.add_tokens([AddedToken("<m>", lstrip=True, rstrip=True, normalized=False), AddedToken("<a>", normalized=False), AddedToken("<a>b", normalized=False)])
    out["added-strip"] = flags
    prefix = byte_level(split(GPT2))
    prefix.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    out["prefix-space"] = prefix
    return out


def shapes(name, spec):
    """The forms of one file that are met in the field."""
    if name == "bytelevel-gpt2":
        del spec["model"]["type"]
        spec["model"]["merges"] = [" ".join(m) for m in spec["model"]["merges"]]
    if name == "bytelevel-o200k":
        spec["model"]["ignore_merges"] = True
        # A token that no merge reaches.
        spec["model"]["vocab"]["Ġmeasured"] = 1000
    return spec


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    # The simulated engine's own model knows the words of our load and of this project's pages.
    pages = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/protocol.md", "bench/plan.go", "cmd/kvroute/e2e_test.go"]
    text = [pathlib.Path(p).read_text() for p in pages]
    load = re.search(r"vocabulary = strings.Fields\(`(.*?)`", text[4], re.S).group(1).split()
    sim = json.loads(byte_level(split(QWEN2), normalizers.NFC(), 1500, CORPUS.splitlines(True) + text + [" " + " ".join(load)] * 40).to_str())
    pathlib.Path(sys.argv[2]).write_text(json.dumps(sim, ensure_ascii=False, separators=(",", ":")))
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(1)
    joined = []
    for _ in range(60):
        joined.append("".join(rng.choice(TEXTS) for _ in range(rng.randint(2, 4)))[:200])
    for name, t in all_tokenizers().items():
        spec = shapes(name, json.loads(t.to_str()))
        text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
        (folder / f"{name}.json").write_text(text)
        t = Tokenizer.from_str(text)
        with open(folder / f"{name}.jsonl", "w") as f:
            more = HAN_TEXTS if name == "bytelevel-kimi" else UNICODE_TEXTS if name in NEW else GAPS_TEXTS if "gaps" in name else []
            few = joined[:24] if more and name != "bytelevel-digit-runs" and "gaps" not in name else joined
            if t.normalizer and "ByteLevel" in text:
                more = more + MARK_TEXTS
            for k, x in enumerate(TEXTS + few + more):
                special = k % 7 == 3
                row = {"text": x, "special": special, "ids": t.encode(x, add_special_tokens=special).ids}
                f.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    ranks(folder.parent / "ranks", joined)


def ranks(folder, joined):
    """A rank file, and what tiktoken makes of it with two patterns."""
    folder.mkdir(exist_ok=True)
    spec = json.loads(byte_level(split(KIMI)).to_str())["model"]["vocab"]
    decoder = {c: b for b, c in bytes_to_chars().items()}
    vocab = {bytes(decoder[c] for c in token): i for token, i in spec.items()}
    with open(folder / "own.tiktoken", "w") as f:
        for token, i in sorted(vocab.items(), key=lambda kv: kv[1]):
            f.write(f"{base64.b64encode(token).decode()} {i}\n")
    special = {"<|im_start|>": 1000, "<|im_end|>": 1001}
    for name, pattern in {"kimi": KIMI, "o200k": O200K}.items():
        t = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=vocab, special_tokens=special)
        with open(folder / f"{name}.jsonl", "w") as f:
            f.write(json.dumps({"pattern": pattern, "special": special}, ensure_ascii=False) + "\n")
            for x in TEXTS + joined[:20] + HAN_TEXTS:
                f.write(json.dumps({"text": x, "ids": t.encode(x, allowed_special="all")}, ensure_ascii=False, separators=(",", ":")) + "\n")


    kimi_long(folder / "kimi-long.jsonl", tiktoken.Encoding("kimi", pat_str=KIMI, mergeable_ranks=vocab, special_tokens=special), special)


def kimi_long(path, model, special):
    """Long texts as Kimi's class encodes them: between its special tokens, in slices of 400,000 characters, which are cut
    where a run of spaces or of other characters exceeds 25,000. Texts stand as [part, count]…, ids as zlib of 32 bits each.
    """
    with open(path, "w") as f:
        for parts in [
            [["a", 25000]], [["a", 25001]], [["the", 20000]], [[" ", 25001], ["x", 1]], [["中", 25001], [" a", 1]], [["the", 8333], [" ", 1], ["the", 12501]],
            [["a", 20000], ["\x1c", 1], ["a", 20000]], [["a", 20000], ["\x0b", 1], ["a", 60001]], [["word ", 80001]], [["one\n", 99999], ["two", 20001]],
            [["a", 20000], ["<|im_end|>", 1], ["a", 20001]], [["a ", 100000], ["<|im_start|>", 1], ["a ", 150000], ["bc", 60000]],
        ]:
            ids = []
            for part in re.split("(" + "|".join(map(re.escape, special)) + ")", "".join(x * n for x, n in parts)):
                for i in range(0, len(part), 400_000):
                    piece = part[i : i + 400_000]
                    start = run = 0
                    for k, c in enumerate(piece):
                        run = run + 1 if k and c.isspace() == piece[k - 1].isspace() else 1
                        if run > 25_000:
                            ids += model.encode(piece[start:k], allowed_special="all")
                            start, run = k, 1
                    ids += model.encode(piece[start:], allowed_special="all")
            packed = base64.b64encode(zlib.compress(struct.pack(f"<{len(ids)}I", *ids), 9)).decode()
            f.write(json.dumps({"parts": parts, "ids": packed}, ensure_ascii=False) + "\n")


def bytes_to_chars():
    chars, n = {}, 256
    for b in range(256):
        if b <= 0x20 or 0x7F <= b <= 0xA0 or b == 0xAD:
            chars[b] = chr(n)
            n += 1
        else:
            chars[b] = chr(b)
    return chars


main()
