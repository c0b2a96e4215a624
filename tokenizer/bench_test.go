// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/tokenizer"
)

// proseOf returns size bytes of text made of words in random order.
func proseOf(words []string, sep string, size int) []byte {
	r := rand.New(rand.NewPCG(1, 1))
	var b bytes.Buffer
	for b.Len() < size {
		b.WriteString(words[r.IntN(len(words))])
		if r.IntN(12) == 0 {
			b.WriteString("。\n")
		}
		b.WriteString(sep)
	}
	return b.Bytes()
}

func BenchmarkAppend(b *testing.B) {
	texts := map[string][]byte{
		"prose": proseOf(strings.Fields("the router reads a prompt and turns it into tokens of which the worker has cached blocks, isn't that quick?"), " ", 64<<10),
		"cjk":   proseOf(strings.Fields("路由 选择 已经 缓存 前缀 的 节点 所以 第一个 词元 来得 更快 计算 一次 使用 多次 我们 系统 模型 请求 延迟"), "", 64<<10),
		"code":  proseOf(strings.Split("if err != nil {\n\treturn err\n}\n|func (r *Router) |self.x[0] = |\"key\": 12.5, |camelCaseName(|);\n|    // comment\n", "|"), "", 64<<10),
	}
	for _, name := range []string{"qwen3", "gpt-oss", "mistral-v3"} {
		tok := reference(b, name)
		if tok == nil {
			continue
		}
		for kind, text := range texts {
			b.Run(name+"/"+kind, func(b *testing.B) {
				var dst []uint32
				b.SetBytes(int64(len(text)))
				b.ReportAllocs()
				for b.Loop() {
					var err error
					if dst, err = tok.Append(context.Background(), dst[:0], text, false); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkNextTurn(b *testing.B) {
	tok := reference(b, "qwen3")
	if tok == nil {
		tok = golden(b, "bytelevel-qwen2-nfc")
	}
	words := strings.Fields("the router reads a prompt and turns it into tokens of which the worker has cached blocks, isn't that quick?")
	text := proseOf(words, " ", 420<<10)
	c := tokenizer.NewCache(64 << 20)
	dst, _, _ := c.Append(context.Background(), nil, tok, text, false)
	b.ReportMetric(float64(len(dst)), "tokens")
	for i := 0; b.Loop(); i++ {
		turn := fmt.Appendf(slices.Clip(text), "turn %d %s", i, text[:2000])
		var err error
		if dst, _, err = c.Append(context.Background(), dst[:0], tok, turn, false); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLoad(b *testing.B) {
	for _, name := range []string{"qwen3", "gpt-oss", "mistral-v3"} {
		dir := fixtures.Path(b, "tokenizers", name)
		if dir == "" {
			continue
		}
		file, err := tokenizer.ReadFile(os.DirFS(dir), "tokenizer.json")
		if err != nil {
			b.Fatal(err)
		}
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(file)))
			for b.Loop() {
				if _, err := loadBytes(file); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkForgotten encodes texts with no word known from earlier texts.
func BenchmarkForgotten(b *testing.B) {
	file := fixtures.Path(b, "vectors", "kitoken", "utf8_input.txt")
	if file == "" {
		return
	}
	text, err := os.ReadFile(file)
	if err != nil {
		b.Fatal(err)
	}
	for _, name := range []string{"qwen3", "gpt-oss", "tinyllama", "mistral-v3"} {
		tok := reference(b, name)
		b.Run(name, func(b *testing.B) {
			var dst []uint32
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				tok.Forget()
				if dst, err = tok.Append(context.Background(), dst[:0], text, false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
