// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
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

// tokenizeConfig is the flags of `kvroute tokenize`, with the tags of config.
type tokenizeConfig struct {
	modelConfig `yaml:",inline"`

	Request   string `yaml:"request" default:"-" help:"<file> with the body of a request; - reads the standard input"`
	Path      string `yaml:"path" help:"<path> of the request, as /v1/responses; empty decides by the body's fields"`
	BlockSize int    `yaml:"block-size" default:"16" want:"more than 0" help:"<tokens> in a block"`
	Adapter   string `yaml:"lora" help:"<name> of the adapter"`
	Salt      string `yaml:"salt" help:"cache salt, if the body has none"`
	JSON      bool   `yaml:"json" help:"print all as JSON"`
	Text      bool   `yaml:"text" help:"print each token's text"`
}

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
	Again    time.Duration  `json:"again_ns"` // duration of a second run, with warm caches

	Others int `json:"other_tokens,omitempty"` // of further prompts and of items, mostly estimated
}

// tokenizeFile prints the ids, blocks and hashes of a request.
func tokenizeFile(ctx context.Context, args []string, std stdio) error {
	var c tokenizeConfig
	if err := parseSettings("tokenize", args, &c); err != nil {
		return err
	}
	body, err := readRequest(c.Request, c.Path)
	if err != nil {
		return err
	}
	out, model, err := c.tokenize(ctx, &body, std.err)
	if err != nil {
		return err
	}
	if c.JSON {
		return writeJSON(std.out, out)
	}
	return out.print(std.out, model, c.BlockSize, c.Text)
}

// tokenize loads the model and tokenizes a request with it.
func (c *tokenizeConfig) tokenize(
	ctx context.Context, body *openai.Body, log io.Writer,
) (out *tokenized, model *tokenizer.Model, err error) {
	start := time.Now()
	cache := tokenizer.NewCache(64 << 20)
	if c.Tokenizer == "" {
		model, err = tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{Cache: cache})
	} else {
		var card router.Card
		card, err = loadCard(c.modelConfig, cache, slog.New(slog.NewTextHandler(log, nil)))
		model = card.Prompts
	}
	if err != nil {
		return nil, nil, err
	}
	out = &tokenized{Load: time.Since(start)}
	var p tokenizer.Prompt
	for _, took := range []*time.Duration{&out.Encode, &out.Again} {
		start = time.Now()
		if p, err = model.Encode(ctx, nil, body.Request, start); err != nil {
			return nil, nil, err
		}
		*took = time.Since(start)
	}
	if body.Tokens != nil {
		p = tokenizer.Prompt{IDs: body.Tokens, Exact: len(body.Tokens), Mode: tokenizer.Exact}
	}
	out.Mode, out.Reason, out.Exact, out.IDs, out.Others = p.Mode, p.Reason, p.Exact, p.IDs, p.Others
	out.Local = indexer.AppendLocalHashes(nil, p.IDs[:p.Exact], c.BlockSize,
		indexer.Seed(c.Adapter, cmp.Or(body.CacheSalt, c.Salt)))
	out.Sequence = indexer.AppendSequenceHashes(nil, out.Local)
	return out, model, nil
}

// readRequest reads the body of a request for the endpoint at path.
func readRequest(file, path string) (openai.Body, error) {
	endpoint := openai.Other
	if path != "" {
		if endpoint, _ = openai.Classify(http.MethodPost, path); endpoint == openai.Other {
			return openai.Body{}, fmt.Errorf("--path is %q, want that of an endpoint with a prompt, as /v1/chat/completions",
				path)
		}
	}
	if file == "-" {
		file = "/dev/stdin"
	}
	data, err := os.ReadFile(file)
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
	fmt.Fprintf(w, "; files loaded in %v, encoded in %v, again in %v\n", t.Load.Round(time.Millisecond),
		t.Encode.Round(time.Microsecond), t.Again.Round(time.Microsecond))
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
