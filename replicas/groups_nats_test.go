// SPDX-License-Identifier: Apache-2.0

package replicas_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

const quick = 100 * time.Millisecond // between summaries

// lowerTier starts a router of a group, with its publisher.
func lowerTier(t *testing.T, s *server.Server, group string, id uint64) (r *router.Router, stop func()) {
	t.Helper()
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for w := range uint64(2) {
		if err := r.SetWorker(router.WorkerInfo{
			ID: 10*id + w, Models: []string{"m"}, BlockSize: 8, TotalKVBlocks: 100,
			Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(id), byte(w)}), 8000),
		}); err != nil {
			t.Fatal(err)
		}
	}
	publisher, err := replicas.NewGroupPublisher(natstest.Connect(t, s), replicas.GroupPublisherConfig{Group: group, ID: id, Router: r, Interval: quick})
	if err != nil {
		t.Fatal(err)
	}
	return r, natstest.Run(t, publisher.Run)
}

// upperTier is a router above groups.
type upperTier struct {
	*router.Router
	groups *replicas.Groups
	stop   func()
}

func startUpper(t *testing.T, s *server.Server, probe bool, groups ...replicas.Group) *upperTier {
	t.Helper()
	nc := natstest.Connect(t, s)
	conf := router.Config{}
	if probe {
		probes, err := replicas.NewProbes(nc, replicas.ProbesConfig{Budget: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		conf.Probe = probes.Ask
	}
	r, err := router.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	u := &upperTier{Router: r}
	registry, err := fleet.NewRegistry(nc, fleet.RegistryConfig{Remove: r.RemoveWorker, Set: func(i router.WorkerInfo) {
		if err := r.SetWorker(i); err != nil {
			t.Error(err)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	u.groups, err = replicas.NewGroups(nc, replicas.GroupsConfig{
		Groups: groups, Summary: r.SetSummary,
		Set: registry.SetStatic,
	})
	if err != nil {
		t.Fatal(err)
	}
	u.stop = natstest.Run(t, u.groups.Run)
	return u
}

// states returns the groups' states in an upper tier, by name.
func (u *upperTier) states() map[string]router.WorkerState {
	all := map[string]router.WorkerState{}
	for _, w := range u.Workers() {
		all[w.Group] = w
	}
	return all
}

// fresh reports whether a group's summaries are current and count two members.
func (u *upperTier) fresh(group string) bool {
	s := u.states()[group].Summary
	return s != nil && !s.Stale && s.Members == 2
}

// decide requests a decision without booking, so that no blocks are predicted from it.
func (u *upperTier) decide(t *testing.T, tokens []uint32) router.Decision {
	t.Helper()
	d, err := u.BestWorker(t.Context(), router.Request{Model: "m", Tokens: tokens, Explain: true})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func stores(r *router.Router, worker uint64, tokens []uint32) {
	local := indexer.AppendLocalHashes(nil, tokens, 8, indexer.Seed("", ""))
	ev := indexer.Event{Kind: indexer.Stored}
	for i, s := range indexer.AppendSequenceHashes(nil, local) {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: s, Local: local[i]})
	}
	r.ApplyEvent(router.Worker{ID: worker}, ev)
}

// promptOf is a prompt of n blocks of 8 tokens that shares no beginning with others.
func promptOf(first uint32, n int) []uint32 {
	tokens := make([]uint32, 8*n)
	for i := range tokens {
		tokens[i] = first*1000 + uint32(i)
	}
	return tokens
}

var two = []replicas.Group{{Name: "g1", Address: "10.1.0.1:80", Models: []string{"m"}}, {Name: "g2", Address: "10.1.0.2:80"}}

// A router above two groups learns their models, blocks and loads, and sends each prompt
// to the group that has it. A silent group is used only if no other group is left. A
// group that returns is used again, whichever of its replicas publishes.
func TestGroupsOverNATS(t *testing.T) {
	s := natstest.Start(t, 0)
	g1, stop1 := lowerTier(t, s, "g1", 1)
	g2, _ := lowerTier(t, s, "g2", 2)
	a, b := promptOf(1, 16), promptOf(2, 16)
	stores(g1, 10, a)
	stores(g2, 21, b)
	lowerTier(t, s, "stranger", 3)
	u := startUpper(t, s, false, two...)
	if all := u.states(); len(all) != 1 || all["g1"].Summary.Age >= 0 {
		t.Errorf("at first the states are %+v", all)
	}
	overlap := func(tokens []uint32) string {
		d := u.decide(t, tokens)
		return fmt.Sprint(d.Group, " ", d.OverlapBlocks, " ", d.Address)
	}
	natstest.Eventually(t, func() bool {
		return u.fresh("g1") && u.fresh("g2") && overlap(a) == "g1 16 10.1.0.1:80" && overlap(b) == "g2 16 10.1.0.2:80"
	})
	// The upper tier soon knows blocks that a group stores.
	c := promptOf(3, 10)
	stores(g2, 20, c)
	natstest.Eventually(t, func() bool { return overlap(c) == "g2 8 10.1.0.2:80" })
	// The upper tier soon knows the group's load.
	for i := range 10 {
		if _, err := g1.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(i), Owned: true, Model: "m", Tokens: promptOf(9, 100)}); err != nil {
			t.Fatal(err)
		}
	}
	natstest.Eventually(t, func() bool { w := u.states()["g1"]; return w.ActiveRequests == 10 && w.PendTokens > 0 })
	// The group leaves: its blocks stay known, but other groups are preferred.
	stop1()
	natstest.Eventually(t, func() bool {
		d := u.decide(t, a)
		return d.Group == "g2" && slices.ContainsFunc(d.Candidates, func(c router.Candidate) bool {
			return c.Group == "g1" && c.Excluded == router.ExcludedStale
		})
	})
	// Two replicas replace it. They hold fewer blocks; one leaves, and the other
	// continues.
	again, stopA := lowerTier(t, s, "g1", 4)
	stores(again, 40, a[:8*8])
	natstest.Eventually(t, func() bool { return u.fresh("g1") && overlap(a) == "g1 8 10.1.0.1:80" })
	other, _ := lowerTier(t, s, "g1", 5)
	stores(other, 50, a[:8*12])
	stopA()
	natstest.Eventually(t, func() bool { return overlap(a) == "g1 12 10.1.0.1:80" })
	// The upper tier restarts.
	u.stop()
	u = startUpper(t, s, false, two...)
	natstest.Eventually(t, func() bool { return overlap(a) == "g1 12 10.1.0.1:80" && overlap(b) == "g2 16 10.1.0.2:80" })
	// A group leaves the configuration.
	if err := u.groups.Replace(two[:1]); err != nil {
		t.Fatal(err)
	}
	if all := u.states(); len(all) != 1 || all["g1"].Summary.Age < 0 {
		t.Errorf("without g2 the states are %+v", all)
	}
}

// With few groups each is probed: the answer is exact, and names the worker.
func TestProbesOverNATS(t *testing.T) {
	s := natstest.Start(t, 0)
	g1, _ := lowerTier(t, s, "g1", 1)
	g2, _ := lowerTier(t, s, "g2", 2)
	u := startUpper(t, s, true, replicas.Group{Name: "g1", Address: "10.1.0.1:80", Models: []string{"m"}, BlockSize: 8}, replicas.Group{Name: "g2", Address: "10.1.0.2:80", Models: []string{"m"}, BlockSize: 8})
	natstest.Eventually(t, func() bool { return u.fresh("g1") && u.fresh("g2") })
	a := promptOf(1, 10)
	stores(g1, 11, a[:8*5])
	stores(g2, 20, a[:8*7])
	d := u.decide(t, a)
	if d.Group != "g2" || d.OverlapBlocks != 7 || d.Member == nil || d.Member.ID != 20 || d.ProbeTime <= 0 {
		t.Errorf("decision %+v, member %v", d, d.Member)
	}
	for _, c := range d.Candidates {
		if !c.Probed || c.Members != 1 || c.OverlapBlocks != map[string]int{"g1": 5, "g2": 7}[c.Group] {
			t.Errorf("candidate %+v", c)
		}
	}
	if n := len(g1.Decisions(9)) + len(g2.Decisions(9)); n != 0 {
		t.Errorf("%d were booked by probes", n)
	}
}

// A group that does not answer in time uses up the time budget a few times, and
// afterwards at most once a second.
func TestProbesGiveUp(t *testing.T) {
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	const budget = 50 * time.Millisecond
	probes, err := replicas.NewProbes(nc, replicas.ProbesConfig{Budget: budget, Most: 3})
	if err != nil {
		t.Fatal(err)
	}
	probe := func(groups ...string) []router.ProbeAnswer {
		return probes.Ask(t.Context(), router.Probe{ID: "r", Model: "m", BlockSize: 8, Tokens: 8, Local: []uint64{1}, Groups: groups})
	}
	if got := probe("g1"); got != nil {
		t.Errorf("before the group answers: %+v", got)
	}
	lowerTier(t, s, "g1", 1)
	natstest.Eventually(t, func() bool { return len(probe("g1")) == 1 })
	mute := natstest.Connect(t, s)
	silent, err := mute.SubscribeSync("kvroute.v1.kvroute.group.silent.probe")
	if err != nil {
		t.Fatal(err)
	}
	if err := mute.Flush(); err != nil { // wait until the server has the subscription
		t.Fatal(err)
	}
	heard := func() int { n, _, _ := silent.Pending(); return n }
	start, asked := time.Now(), 0
	for ; asked < 20; asked++ {
		probe("g1", "silent")
	}
	natstest.Eventually(t, func() bool { return heard() >= 3 })
	if n, most := heard(), 3+int(time.Since(start)/time.Second)+1; n > most {
		t.Errorf("a group that does not answer was asked %d times of %d, want at most %d", n, asked, most)
	}
	natstest.Eventually(t, func() bool {
		got := probe("g1", "silent", "nobody")
		return len(got) == 1 && got[0].Group == "g1"
	})
	if got := probe("a", "b", "c", "g1"); got != nil {
		t.Errorf("a probe of four groups is sent, though the limit is three: %+v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := probes.Ask(ctx, router.Probe{Model: "m", BlockSize: 8, Groups: []string{"silent2"}}); got != nil {
		t.Errorf("after the context's end: %+v", got)
	}
}

func TestGroupsAreTheirOwn(t *testing.T) {
	if replicas.GroupWorkerID("a/b", "m") == replicas.GroupWorkerID("a", "b/m") {
		t.Error("two groups have the same candidate")
	}
}

func TestBadGroupsAreRefused(t *testing.T) {
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	set := func([]fleet.Record) error { return nil }
	summary := func(uint64, router.Summary) bool { return true }
	for want, groups := range map[string][]replicas.Group{
		"name has 0 bytes":    {{Address: "10.0.0.1:80"}},
		"want each name once": {{Name: "a", Address: "10.0.0.1:80"}, {Name: "a", Address: "10.0.0.2:80"}},
		"want ip:port":        {{Name: "a", Address: "gateway:80"}},
		"block_size is -1":    {{Name: "a", Address: "10.0.0.1:80", BlockSize: -1}},
		"at most 64":          {{Name: "a", Address: "10.0.0.1:80", Models: make([]string, 65)}},
		"at most 1024":        make([]replicas.Group, 1025),
	} {
		_, err := replicas.NewGroups(nc, replicas.GroupsConfig{Groups: groups, Set: set, Summary: summary})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
	if _, err := replicas.NewGroups(nc, replicas.GroupsConfig{}); err == nil {
		t.Error("a configuration without Set and Summary is accepted")
	}
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for want, conf := range map[string]replicas.GroupPublisherConfig{
		"required":         {Group: "g", ID: 1},
		"interval is 1ms":  {Group: "g", ID: 1, Router: r, Interval: time.Millisecond},
		"stride is -4":     {Group: "g", ID: 1, Router: r, Stride: -4},
		"the name has 300": {Group: strings.Repeat("g", 300), ID: 1, Router: r},
	} {
		if _, err := replicas.NewGroupPublisher(nc, conf); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one with %q", err, want)
		}
	}
}
