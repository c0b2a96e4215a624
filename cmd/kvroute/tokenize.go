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
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/internal/reach"
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

	Others int       `json:"other_tokens,omitempty"` // of further prompts and of items, mostly a guess
	Worker *compared `json:"worker,omitempty"`
}

// compared is what a worker makes of the same prompt.
type compared struct {
	Tokens int `json:"tokens"`
	// Differs is the position of the first id that differs, -1 if none does.
	Differs int      `json:"differs"`
	Ours    []uint32 `json:"ours,omitempty"`   // ids around it
	Theirs  []uint32 `json:"theirs,omitempty"` // the worker's
}

// tokenizeFile prints what kvroute makes of a request: ids, blocks and hashes, and
// how they differ from a worker's.
func tokenizeFile(ctx context.Context, args []string, std stdio) error {
	var m modelConfig
	fs := newFlagSet("tokenize", std.err)
	fs.StringVar(&m.Tokenizer, "tokenizer", "", "`folder` with the model's files; empty takes that of the simulated engine")
	fs.StringVar(&m.ChatTemplate, "chat-template", "", "`file` with a chat template instead of the model's")
	fs.StringVar(&m.Pattern, "pattern", "", "how a rank file parts words: gpt2, cl100k, o200k, kimi, or an `expression`")
	fs.StringVar(&m.TokenizerMode, "tokenizer-mode", "", "the engine's --tokenizer-mode: hf or mistral; empty takes what vLLM takes by itself")
	fs.StringVar(&m.Profile, "profile", "vllm", "engine: vllm, sglang or trtllm")
	file := fs.String("request", "-", "`file` with the body of a request; - reads the standard input")
	path := fs.String("path", "", "`path` of the request, as /v1/responses; empty goes by the body's fields")
	blockSize := fs.Int("block-size", 16, "`tokens` in a block")
	lora := fs.String("lora", "", "`name` of the adapter")
	salt := fs.String("salt", "", "cache salt, if the body has none")
	worker := fs.String("worker", "", "`URL` of a worker to compare with, by its /tokenize; ip:port will do")
	asJSON := fs.Bool("json", false, "print all as JSON")
	text := fs.Bool("text", false, "print each token's text")
	if err := parse(fs, args); err != nil {
		return err
	}
	if *blockSize < 1 {
		return fmt.Errorf("--block-size is %d, want 1 or more", *blockSize)
	}
	body, err := readRequest(*file, *path)
	if err != nil {
		return err
	}
	if *worker != "" && (body.Tokens != nil || !canAsk(body.Request)) {
		return errors.New("--worker: a worker's /tokenize cannot be told all of this prompt: it takes one text or a chat, without reasoning, documents, truncation and ids")
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
	var p tokenizer.Prompt
	for _, took := range []*time.Duration{&out.Encode, &out.Again} {
		start = time.Now()
		if p, err = card.Prompts.Encode(ctx, nil, body.Request, start); err != nil {
			return err
		}
		*took = time.Since(start)
	}
	if body.Tokens != nil {
		p = tokenizer.Prompt{IDs: body.Tokens, Exact: len(body.Tokens), Mode: tokenizer.Exact}
	}
	if body.CacheSalt != "" {
		*salt = body.CacheSalt
	}
	out.Mode, out.Reason, out.Exact, out.IDs, out.Others = p.Mode, p.Reason, p.Exact, p.IDs, p.Others
	out.Local = indexer.AppendLocalHashes(nil, p.IDs[:p.Exact], *blockSize, indexer.Seed(*lora, *salt))
	out.Sequence = indexer.AppendSequenceHashes(nil, out.Local)
	var unasked error // told behind our own ids
	if *worker != "" {
		url := strings.TrimRight(*worker, "/")
		if !strings.Contains(url, "://") {
			url = "http://" + url
		}
		ctx, cancel := context.WithTimeout(ctx, checkTimeout)
		defer cancel()
		var theirs []uint32
		if theirs, unasked = askTokenize(ctx, reach.Networks{}.Client(), url, body.Model, body.Request); unasked == nil {
			out.Worker = &compared{Tokens: len(theirs), Differs: tokenizer.FirstDiff(out.IDs, theirs)}
			if at := out.Worker.Differs; at >= 0 {
				out.Worker.Ours, out.Worker.Theirs = around(out.IDs, at), around(theirs, at)
			}
		}
	}
	if *asJSON {
		err = json.NewEncoder(std.out).Encode(out)
	} else {
		err = out.print(std.out, card.Prompts, *blockSize, *text)
	}
	switch c := out.Worker; {
	case err != nil || unasked != nil:
		return errors.Join(err, unasked)
	case c == nil:
		return nil
	case c.Differs >= 0:
		return fmt.Errorf("the worker makes other tokens from position %d on: ours %d, theirs %d", c.Differs, c.Ours, c.Theirs)
	}
	_, err = fmt.Fprintf(std.err, "the worker makes the same %d tokens\n", out.Worker.Tokens)
	return err
}

// readRequest reads the body of a request for the endpoint at path.
func readRequest(file, path string) (openai.Body, error) {
	endpoint := openai.Other
	if path != "" {
		if endpoint, _ = openai.Classify(http.MethodPost, path); endpoint == openai.Other {
			return openai.Body{}, fmt.Errorf("--path is %q, want that of an endpoint with a prompt, as /v1/chat/completions", path)
		}
	}

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
	body, bad := openai.Parse(endpoint, data)
	switch {
	case bad != nil:
		return body, errors.New(bad.Message)
	case body.Messages == nil && body.Prompt == nil && body.Size == 0:
		return body, errors.New("the request has neither messages nor prompt nor input")
	}
	return body, nil
}

func (t *tokenized) print(w io.Writer, m *tokenizer.Model, blockSize int, text bool) error {
	fmt.Fprintf(w, "%d tokens, mode %s", len(t.IDs), t.Mode)
	if t.Reason != "" {
		fmt.Fprintf(w, " (%s), of which %d are exact", t.Reason, t.Exact)
	}
	if t.Others > 0 {
		fmt.Fprintf(w, ", and about %d of other prompts or items", t.Others)
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
