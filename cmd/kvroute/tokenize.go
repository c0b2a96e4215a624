// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// tokenized is what `kvroute tokenize --json` prints.
type tokenized struct {
	Mode     tokenizer.Mode `json:"mode"`
	Reason   string         `json:"reason,omitempty"`
	Exact    int            `json:"exact"`
	IDs      []uint32       `json:"token_ids"`
	Local    []uint64       `json:"local_hashes"`
	Sequence []uint64       `json:"sequence_hashes"`
	Load     time.Duration  `json:"load_ns"`
	Encode   time.Duration  `json:"encode_ns"`
	Again    time.Duration  `json:"again_ns"` // a second time, its beginning known
}

// tokenizeFile prints what kvroute makes of a request: ids, blocks and hashes, and
// how they differ from a worker's.
func tokenizeFile(ctx context.Context, args []string, std stdio) error {
	var m modelConfig
	fs := newFlagSet("tokenize", std.err)
	fs.StringVar(&m.Tokenizer, "tokenizer", "", "`folder` with the model's files; empty takes that of the simulated engine")
	fs.StringVar(&m.ChatTemplate, "chat-template", "", "`file` with a chat template instead of the model's")
	fs.StringVar(&m.Pattern, "pattern", "", "how a rank file parts words: gpt2, cl100k, o200k, or an `expression`")
	fs.StringVar(&m.Profile, "profile", "vllm", "engine: vllm, sglang or trtllm")
	file := fs.String("request", "-", "`file` with the body of a chat completion or completion; - reads the standard input")
	blockSize := fs.Int("block-size", 16, "`tokens` in a block")
	lora := fs.String("lora", "", "`name` of the adapter")
	salt := fs.String("salt", "", "cache salt, if the body has none")
	worker := fs.String("worker", "", "`URL` of a worker to compare with, by its /tokenize")
	asJSON := fs.Bool("json", false, "print all as JSON")
	text := fs.Bool("text", false, "print each token's text")
	if err := parse(fs, args); err != nil {
		return err
	}
	if *blockSize < 1 {
		return fmt.Errorf("--block-size is %d, want 1 or more", *blockSize)
	}
	body, err := readRequest(*file)
	if err != nil {
		return err
	}
	start := time.Now()
	card := router.Card{}
	cache := tokenizer.NewCache(64 << 20)
	if m.Tokenizer == "" {
		card.Prompts, err = tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{Cache: cache})
	} else {
		card, err = loadCard(m, cache, slog.New(slog.NewTextHandler(std.err, nil)))
	}
	if err != nil {
		return err
	}
	out := tokenized{Load: time.Since(start)}
	start = time.Now()
	p, err := card.Prompts.Encode(ctx, nil, body.Request, start)
	if err != nil {
		return err
	}
	out.Encode = time.Since(start)
	start = time.Now()
	if _, err := card.Prompts.Encode(ctx, nil, body.Request, start); err != nil {
		return err
	}
	out.Again = time.Since(start)
	if body.CacheSalt != "" {
		*salt = body.CacheSalt
	}
	out.Mode, out.Reason, out.Exact, out.IDs = p.Mode, p.Reason, p.Exact, p.IDs
	out.Local = indexer.AppendLocalHashes(nil, p.IDs[:p.Exact], *blockSize, indexer.Seed(*lora, *salt))
	out.Sequence = indexer.AppendSequenceHashes(nil, out.Local)
	if *asJSON {
		err = json.NewEncoder(std.out).Encode(out)
	} else {
		err = out.print(std.out, card.Prompts, *blockSize, *text)
	}
	if err != nil || *worker == "" {
		return err
	}
	theirs, err := askTokenize(ctx, http.DefaultClient, *worker, body.Model, body.Request)
	if err != nil {
		return err
	}
	if at := tokenizer.FirstDiff(out.IDs, theirs); at >= 0 {
		return fmt.Errorf("the worker makes other tokens from position %d on: ours %d, theirs %d", at, around(out.IDs, at), around(theirs, at))
	}
	_, err = fmt.Fprintf(std.err, "the worker makes the same %d tokens\n", len(theirs))
	return err
}

func readRequest(file string) (openai.Body, error) {
	var data []byte
	var err error
	if file == "-" {
		data, err = io.ReadAll(os.Stdin)
	} else {
		data, err = os.ReadFile(file)
	}
	if err != nil {
		return openai.Body{}, err
	}
	body, bad := openai.Parse(openai.Other, data)
	switch {
	case bad != nil:
		return body, errors.New(bad.Message)
	case body.Messages == nil && body.Prompt == nil:
		return body, errors.New("the request has neither messages nor prompt")
	}
	return body, nil
}

func (t *tokenized) print(w io.Writer, m *tokenizer.Model, blockSize int, text bool) error {
	fmt.Fprintf(w, "%d tokens, mode %s", len(t.IDs), t.Mode)
	if t.Reason != "" {
		fmt.Fprintf(w, " (%s), of which %d are exact", t.Reason, t.Exact)
	}
	fmt.Fprintf(w, "; files loaded in %v, encoded in %v, again in %v\n", t.Load.Round(time.Millisecond), t.Encode.Round(time.Microsecond), t.Again.Round(time.Microsecond))
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tab, "block\tlocal hash\tsequence hash\ttokens")
	for i := 0; i*blockSize < len(t.IDs); i++ {
		ids := t.IDs[i*blockSize : min((i+1)*blockSize, len(t.IDs))]
		local, sequence := "–", "–"
		if i < len(t.Local) {
			local, sequence = fmt.Sprintf("%016x", t.Local[i]), fmt.Sprintf("%016x", t.Sequence[i])
		}
		fmt.Fprintf(tab, "%d\t%s\t%s\t%d\n", i, local, sequence, ids)
		if text && t.Mode != tokenizer.Bytes {
			fmt.Fprintf(tab, "\t\t\t%q\n", m.Tokenizer().Decode(nil, ids))
		}
	}
	return tab.Flush()
}
