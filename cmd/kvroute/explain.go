// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvroute/kvroute/router"
)

// explain prints a kept decision of a running kvroute: what it knew of each worker,
// why it chose the one, and where the time went.
func explain(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("explain", std.err)
	base := fs.String("url", "http://127.0.0.1:9003", "`URL` of the running kvroute")
	raw := fs.Bool("json", false, "print the decision as JSON")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return errUsage
	}
	if fs.NArg() != 1 {
		return errors.New("want the id of a request, as in x-dynamo-request-id, or \"last\"")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	id := fs.Arg(0)
	query := "id=" + url.QueryEscape(id)
	if id == "last" {
		query = "limit=1"
	}
	text, err := ask(ctx, strings.TrimRight(*base, "/")+"/v1/decisions?"+query)
	if err != nil {
		return err
	}
	var answer struct {
		router.Decision
		Decisions []router.Decision `json:"decisions"`
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return fmt.Errorf("read the answer of %s: %w", *base, err)
	}
	d := &answer.Decision
	if id == "last" {
		if len(answer.Decisions) == 0 {
			return errors.New("nothing was decided yet")
		}
		d = &answer.Decisions[0]
	}
	if *raw {
		enc := json.NewEncoder(std.out)
		enc.SetIndent("", "  ")
		return enc.Encode(d)
	}
	return printDecision(std.out, d)
}

// ask gets a URL of kvroute's.
func ask(ctx context.Context, from string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		var e struct{ Error struct{ Message string } }
		if json.Unmarshal(text, &e) == nil && e.Error.Message != "" {
			return nil, errors.New(e.Error.Message)
		}
		return nil, fmt.Errorf("%s answers with status %d", from, resp.StatusCode)
	}
	return text, nil
}

func printDecision(out io.Writer, d *router.Decision) error {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, name+"\t"+format+"\n", args...)
	}
	line("request", "%s, %s", d.ID, d.Time.Format(time.RFC3339Nano))
	mode := string(d.TokenMode)
	if d.TokenReason != "" {
		mode += ": " + d.TokenReason
	}
	line("model", "%s", d.Model)
	line("prompt", "%d tokens (%s), %d full blocks", d.PromptTokens, mode, d.PromptBlocks)
	line("worker", "%s at %s", nameOf(d.Worker, d.WorkerName), d.Address)
	line("reason", "%s", because(d))
	line("expected", "%d of its blocks are cached, %d tokens to compute, first token in %.0f ms (%.0f ms by rule of thumb)", d.OverlapBlocks, d.PrefillTokens, d.EstimatedTTFT, d.CoarseTTFT)
	steps := fmt.Sprintf("tokens and hashes %v, match %v, choice and booking %v", d.TokenizeTime, d.MatchTime, d.PickTime)
	if d.QueueTime > 0 {
		steps = fmt.Sprintf("waited %v; ", d.QueueTime) + steps
	}
	line("time", "%s", steps)
	if !d.FirstToken.IsZero() {
		line("first token", "after %v", d.FirstToken.Sub(d.Time))
	}
	if !d.Freed.IsZero() {
		line("end", "after %v", d.Freed.Sub(d.Time))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(out)
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "worker\tcached\tpending\trequests\tactive\tadds\tcost\t\t\n")
	for _, c := range d.Candidates {
		mark := ""
		switch {
		case c.Worker == d.Worker:
			mark = "<- chosen"
		case c.Excluded != "":
			mark = "not: " + string(c.Excluded)
		}
		cost := "-"
		if d.Policy != "" && c.Excluded == "" {
			cost = strconv.FormatFloat(c.Cost, 'g', 6, 64)
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%s\t%s\t\n", nameOf(c.Worker, c.WorkerName), c.OverlapBlocks, c.PendTokens, c.ActiveRequests, c.ActiveBlocks, c.AdditionalBlocks, cost, mark)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintln(out, "cached, active, adds: blocks; pending: tokens")
	return err
}

// because says in words why the worker was chosen.
func because(d *router.Decision) string {
	switch d.Reason {
	case router.ReasonPinned:
		return "pinned: the request names it"
	case router.ReasonSession:
		return "session: its session is bound to it"
	case router.ReasonRoundRobin, router.ReasonMode:
		return fmt.Sprintf("%s: mode %s", d.Reason, d.Mode)
	case router.ReasonKV, router.ReasonLoad, router.ReasonUnread, router.ReasonTokenizer:
	}
	text := fmt.Sprintf("%s: cost %.6g by %s", d.Reason, d.Cost, d.Policy)
	if d.Policy == "" {
		text = fmt.Sprintf("%s: cost %.6g by a rule of its own", d.Reason, d.Cost)
	}
	if d.Equal > 1 {
		text += fmt.Sprintf("; %d cost the same: fewer requests, then fewer blocks, then a draw", d.Equal)
	}
	return text
}

func nameOf(w router.Worker, name string) string {
	id := strconv.FormatUint(w.ID, 10)
	if name != "" {
		id = name
	}
	if w.DPRank > 0 {
		id += fmt.Sprintf("/%d", w.DPRank)
	}
	return id
}
