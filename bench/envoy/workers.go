// SPDX-License-Identifier: Apache-2.0

package main

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

const (
	blockTokens  = 16
	frontModel   = "sim"
	answerTokens = 8
	// headerPrompt has the number of the request's prompt, so that a worker need not tokenize.
	headerPrompt = "X-Bench-Prompt"
)

// prompt is a request with the block hashes and tokens of its prompt.
type prompt struct {
	body            []byte
	tokens          []uint32
	local, sequence []uint64
}

// prompts has the prompts of the current round. Requests of any goroutine may read it; it is replaced
// between rounds only.
type prompts struct {
	all    []prompt
	stream bool // the workers answer with events
}

// fleet is four workers that answer at once, and publish what a vLLM with an endless cache would store.
type fleet struct {
	addresses []string
	workers   []*cachingWorker
}

type cachingWorker struct {
	prompts *prompts
	sockets *enginesim.Sockets
	mu      sync.Mutex
	held    map[uint64]bool // sequence hashes; guarded by mu
}

// startFleet starts workers in this process.
func startFleet(ctx context.Context, p *prompts) *fleet {
	f := &fleet{}
	for range 4 {
		w := &cachingWorker{prompts: p, held: make(map[uint64]bool), sockets: bench.Must(enginesim.NewSockets(enginesim.SocketsConfig{Endpoint: "tcp://127.0.0.1:0"}))}
		go func() { _ = w.sockets.Run(ctx) }() // ends with ctx
		l := bench.Must(net.Listen("tcp", "127.0.0.1:0"))
		s := &http.Server{Handler: w, ReadHeaderTimeout: time.Minute}
		go func() { _ = s.Serve(l) }()
		context.AfterFunc(ctx, func() { _ = s.Close() })
		f.addresses, f.workers = append(f.addresses, l.Addr().String()), append(f.workers, w)
	}
	return f
}

// records returns the workers as kvroute's configuration lists them.
func (f *fleet) records() string {
	var text strings.Builder
	for i, w := range f.workers {
		live, _ := w.sockets.Endpoints()
		fmt.Fprintf(&text, "- {name: w%d, address: %q, engine: vllm, models: [%s], block_size: %d, events: {transport: zmq, endpoint: %q}}\n",
			i, f.addresses[i], frontModel, blockTokens, live)
	}
	return text.String()
}

// ServeHTTP stores the prompt's blocks and answers with a document or a few events.
func (w *cachingWorker) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // an error is the client's
	if n, err := strconv.Atoi(r.Header.Get(headerPrompt)); err == nil {
		w.store(&w.prompts.all[n])
	}
	if w.prompts.stream {
		stream(out, answerTokens, 0)
	} else {
		document(out)
	}
}

func (w *cachingWorker) store(p *prompt) {
	w.mu.Lock()
	at := 0
	for at < len(p.sequence) && w.held[p.sequence[at]] {
		at++
	}
	for _, h := range p.sequence[at:] {
		w.held[h] = true
	}
	w.mu.Unlock()
	if at == len(p.sequence) {
		return
	}
	c := enginesim.Change{Event: indexer.Event{Kind: indexer.Stored}, Tokens: p.tokens[at*blockTokens : len(p.sequence)*blockTokens]}
	for i := at; i < len(p.sequence); i++ {
		c.Blocks = append(c.Blocks, indexer.Block{Local: p.local[i], External: p.sequence[i]})
	}
	if at > 0 {
		c.HasParent, c.Parent = true, p.sequence[at-1]
	}
	w.sockets.Publish(c)
}

// frontFiles writes the model's folder for Dynamo and kvroute: the tokenizer of the reference data, or
// a small one of the project's own.
func frontFiles(dir, shared string) {
	const card = `{"architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","hidden_size":64,"intermediate_size":64,"num_hidden_layers":2,"num_attention_heads":2,` +
		`"num_key_value_heads":2,"vocab_size":151936,"max_position_embeddings":1048576,"bos_token_id":151643,"eos_token_id":151645}`
	bench.NoError(os.MkdirAll(dir, 0o700))
	for name, text := range map[string]string{"config.json": card, "generation_config.json": `{"eos_token_id":[151645]}`} {
		bench.NoError(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	from := filepath.Join(shared, "tokenizers", "qwen3")
	if _, err := os.Stat(from); err != nil {
		from = tokenizerDir
	}
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		data, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			z := bench.Must(gzip.NewReader(bench.Must(os.Open(filepath.Join(from, name+".gz")))))
			data, err = io.ReadAll(z)
		}
		bench.NoError(err)
		bench.NoError(os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
}

// read makes the prompts of bodies.
func (p *prompts) read(ctx context.Context, m *tokenizer.Model, bodies [][]byte, stream bool) {
	p.stream = stream
	p.all = make([]prompt, len(bodies))
	for i, text := range bodies {
		body, bad := openai.Parse(openai.ChatCompletions, text)
		if bad != nil {
			bench.NoError(fmt.Errorf("body %d: %s", i, bad.Message))
		}
		ids := bench.Must(m.Encode(ctx, nil, body.Request, time.Now())).IDs
		local := indexer.AppendLocalHashes(nil, ids, blockTokens, indexer.Seed("", ""))
		p.all[i] = prompt{text, ids, local, indexer.AppendSequenceHashes(nil, local)}
	}
}
