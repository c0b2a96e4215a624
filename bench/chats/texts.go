// SPDX-License-Identifier: Apache-2.0

package chats

import (
	"math/rand/v2"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/rangetable"
)

// odd are the pieces that tokenizers differ about: contractions, spaces, line
// ends, marks, numbers of all scripts, halves of special tokens.
//
//nolint:gochecknoglobals // a table
var odd = []string{
	" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u0085", "\u2003", "\u3000", "'", "'s", "'S", "'ll", "'VE", "'ſ", "’s",
	"é", "e\u0301", "\u0301", "\u0328", "\u1161", "한", "ǅ", "ʰ", "ª", "İ", "ß", "1", "12", "123", "1234", "１２", "٣", "¾", "Ⅷ", "一", ".", "...", "!", "/", "//", "\\", "\"", "(", ")[", "_",
	"<", "<|", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<think>", "</think>", "<tool_call>", "<|im_", "|>", "▁", "▁▁", "\x00", "\x1b", "\x7f",
	"🚀", "👩‍💻", "\ufe0f", "\u200d", "\u200b", "\ufeff", "\U0001e4ec", "\U000105c9\u0307", "\U00011382", "\u0897", "\u1c89", "\ua7cb", "\U0001ccf0",
	"a", "b", "A", "B", "the", " the", "Hello", "HELLO", "helloWorld", "ing", "tion", " and", "x1", "foo_bar", "self.", "return", "{", "}", "};\n", "=> ", "http://", "中文", "日本語", "русский", "العربية", "ไทย", "हिन्दी",
}

// blocks are ranges of code points from which random characters come: most
// scripts, code points of the newest versions, and unassigned ones.
//
//nolint:gochecknoglobals // a table
var blocks = [][2]rune{
	{0x20, 0x7e},
	{0x80, 0x24f},
	{0x250, 0x36f},
	{0x370, 0x5ff},
	{0x600, 0x8ff},
	{0x900, 0xdff},
	{0xe00, 0x11ff},
	{0x1200, 0x1fff},
	{0x2000, 0x2bff},
	{0x2c00, 0x30ff},
	{0x3100, 0x4dbf},
	{0x4e00, 0x9fff},
	{0xa000, 0xabff},
	{0xac00, 0xd7ff},
	{0xe000, 0xe0ff},
	{0xf900, 0xffff},
	{0x10000, 0x10fff},
	{0x11000, 0x12fff},
	{0x16000, 0x18fff},
	{0x1b000, 0x1bfff},
	{0x1d000, 0x1dfff},
	{0x1e000, 0x1ffff},
	{0x20000, 0x323af},
	{0xe0000, 0xe01ff},
}

// Random returns a text of up to a few hundred bytes.
func Random(r *rand.Rand) string {
	var b strings.Builder
	n := 1 + r.IntN(40)
	block := blocks[r.IntN(len(blocks))]
	kind := r.IntN(4)
	for range n {
		switch {
		case kind == 0 || kind == 1 && r.IntN(2) == 0:
			b.WriteString(odd[r.IntN(len(odd))])
		case kind == 2 && r.IntN(4) == 0:
			block = blocks[r.IntN(len(blocks))]
			fallthrough
		default:
			if c := block[0] + r.Int32N(block[1]-block[0]+1); utf8.ValidRune(c) {
				b.WriteRune(c)
			}
		}
	}
	return b.String()
}

// runs are the characters of which texts have long runs: white space, marks that
// combine, marks that part words, digits, letters.
const runs = " \t\n\r\u00a0\u0085\u2003\u3000\u0301\u0323\u0327\u0328\u0e38\u05b0\u0951\u1161\u11a8\u200b\u200d\ufe0f=-_.0一aAé"

// Runs returns a text of long runs of one character or two, a letter or more between
// some of them.
func Runs(r *rand.Rand) string {
	all := []rune(runs)
	var b strings.Builder
	for range 1 + r.IntN(4) {
		run := string(all[r.IntN(len(all))])
		if r.IntN(3) == 0 {
			run += string(all[r.IntN(len(all))])
		}
		n := 1 + r.IntN(80)
		if r.IntN(20) == 0 {
			n *= 50
		}
		b.WriteString(strings.Repeat(run, n))
		if r.IntN(2) == 0 {
			b.WriteString(odd[r.IntN(len(odd))])
		}
	}
	return b.String()
}

// Words of the three kinds of text that are made at random.
//
//nolint:gochecknoglobals // tables
var (
	ChatWords = strings.Fields(`the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one you were all
her she there would their we him been has when who will no more if out so said what up its about into than them can only other new some could time these two may then do first any my now such like our over
man me even most made after also did many before must through back years where much your way well down should because each just those people how too little state good very make world still own see men work long get here between both
life being under never day same another know while last might us great old year off come since against go came right used take three system prompt tokens router worker cache block prefix latency throughput request response
explain summarize translate implement function variable example question answer temperature assistant context window kubernetes envoy gateway performance benchmark distributed inference attention transformer quantization`)
	CodeWords = strings.Split("func (r *Router) |if err != nil {\n\treturn err\n}\n|for i := range |def __init__(self, |self.|import numpy as np\n|return x + 1\n|\t\t|    |const |let result = await |std::vector<int>|() => {|});\n||/* comment */|\"key\": |[0], |0x1f|3.14159, |== |&& |!= null|println!(\"{}\", |class Foo<T> extends Bar|@decorator\n|async |yield |lambda x: x**2|SELECT * FROM users WHERE id = |<div class=\"row\">|</div>\n|npm install --save-dev |git commit -m |snake_case_name |camelCaseName |CONSTANT_VALUE |{}\n\n", "|")
	CJKWords  = strings.Fields(`我们 的 一个 是 在 了 有 和 人 这 中 大 为 上 来 国 地 到 以 说 时候 要 就 出 会 可以 也 你 对 生活 能够 而 子 那 得 于 着 下 自己 之 年 过 发展 后来 作用 里面 用户 道理 行动 所以 然而 家庭 种类 事情 成为 方法 多少 经过 么 去 法律 学习 如果 都 同 现在 当前 没有 动作 面对 起来 看见 定义 天气 分析 还是 进行 好 小 部分 其中 些 主要 样子 理论 心情 她 本来 前面 开始 但是 因为 只 从 想法 实现 日本 军事 者 意义 无法 力量 它 与 长期 把 机器 十分 民族 第一 公司 此外 已经 工作 使用 情况 明白 性能 知道 全部 三 又 关系 点 正在 业务 外部 将 两 高级 间隔 由于 问题 很 最 重要 并且 物理 手段 应该 战略 向 头脑 文化 体系 政府 美好 相同 见解 被 利益 什么 二 等待 产品 或者 新的 制度 身体 果然 加速 西方 斯 月亮 话题 合作 回来 特别 代码 内存 信息 表示 缓存 路由 节点 请求 延迟 令牌 模型 推理 計算 データ です ます した から こと もの 速い モデル サーバー ワーカー 요청 서버 모델 캐시 작업 빠른 합니다 그리고 에서 에게`)
)

// Document returns about size bytes of text of one kind.
func Document(r *rand.Rand, words []string, sep string, size int) string {
	var b strings.Builder
	for b.Len() < size {
		b.WriteString(words[r.IntN(len(words))])
		switch n := r.IntN(40); {
		case sep == "" && n < 3:
			b.WriteString("，")
		case sep == "" && n < 5:
			b.WriteString("。\n")
		case sep != "" && n == 0:
			b.WriteString(", ")
		case sep != "" && n == 1:
			b.WriteString(".\n\n")
		default:
			b.WriteString(sep)
		}
	}
	return b.String()
}

// Settled drops the code points that Unicode 14 and 15 brought. Templates that
// print a list show them as they are or as escapes: as the tables of the engine's
// Python have it, 14.0 in Python 3.11 and 15.0, like ours, in 3.12.
func Settled(r rune) rune {
	if unicode.Is(rangetable.Assigned(unicode.Version), r) && !unicode.Is(rangetable.Assigned("13.0.0"), r) {
		return -1
	}
	return r
}
