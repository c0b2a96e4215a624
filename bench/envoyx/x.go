package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/process"
)

type xv struct {
	name string
	edit func(string) string
	noop bool
	noObs bool
}

func xrun(ctx context.Context, o options) bool {
	worker := httptest.NewServer(http.HandlerFunc(answer))
	defer worker.Close()
	at := worker.Listener.Addr().String()
	dir := bench.Must(os.MkdirTemp("", "x"))
	noop := bench.Must(process.StartChild(ctx, dir, "noop", bench.Must(os.Executable()), "--noop", at))
	defer noop.Stop()
	variants := xvariants()
	var vs []*variant
	for _, x := range variants {
		c := envoy.Config{ListenAddress: "127.0.0.1:0", AdminAddress: "127.0.0.1:0", Pool: []string{at}, NoObserver: x.noObs, ExtProc: []string{noop.At.Extproc}}
		var text bytes.Buffer
		bench.NoError(envoy.Render(&text, c))
		config := text.String()
		if x.edit != nil {
			n := x.edit(config)
			if n == config { panic("no edit " + x.name) }
			config = n
		}
		e := bench.Must(envoytest.Start(ctx, envoytest.Options{Config: []byte(config)}))
		defer e.Stop()
		vs = append(vs, &variant{x.name, e, noop})
	}
	rng := rand.New(rand.NewPCG(1, 1))
	texts := newTexts(rng)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}
	size := 10 << 10
	if s := os.Getenv("SIZE"); s != "" { fmt.Sscan(s, &size) }
	tokens := 0
	if s := os.Getenv("TOKENS"); s != "" { fmt.Sscan(s, &tokens) }
	n := 600
	if s := os.Getenv("N"); s != "" { fmt.Sscan(s, &n) }
	bodies := make([][]byte, n)
	for i := range bodies { bodies[i] = texts.body(size, tokens) }
	type r struct{ e, s, w float64 }
	res := make([][]r, len(vs))
	for round := range o.rounds {
		for _, i := range rng.Perm(len(vs)) {
			v := vs[i]
			var perf *exec.Cmd
			if os.Getenv("PERF") != "" && round == 1 {
				perf = exec.Command("perf", "record", "-q", "-g", "-F", "999", "-p", fmt.Sprint(v.envoy.Pid()), "-o", "/tmp/w/m/perf."+strings.ReplaceAll(v.name, " ", "_"))
				bench.NoError(perf.Start())
				time.Sleep(300*time.Millisecond)
			}
			a := v.used(ctx)
			t := time.Now()
			var wg sync.WaitGroup
			next := make(chan int, n)
			for k := range n { next <- k }
			close(next)
			for range 8 {
				wg.Go(func() { for k := range next { post(ctx, client, v.envoy.URL()+"/v1/chat/completions", bodies[k]) } })
			}
			wg.Wait()
			w := time.Since(t)
			time.Sleep(100 * time.Millisecond)
			b := v.used(ctx)
			res[i] = append(res[i], r{ms(b.proxy-a.proxy) / float64(n), ms(b.server-a.server) / float64(n), ms(w) / float64(n)})
			if perf != nil { perf.Process.Signal(os.Interrupt); perf.Wait() }
		}
	}
	for i, v := range vs {
		med := func(f func(r) float64) float64 { var x []float64; for _, y := range res[i] { x = append(x, f(y)) }; sort.Float64s(x); return x[len(x)/2] }
		mn := func(f func(r) float64) float64 { var x []float64; for _, y := range res[i] { x = append(x, f(y)) }; return slices.Min(x) }
		fmt.Printf("%-40s envoy %.3f (min %.3f) ms  server %.3f (min %.3f)  wall %.3f\n", v.name, med(func(x r) float64 { return x.e }), mn(func(x r) float64 { return x.e }), med(func(x r) float64 { return x.s }), mn(func(x r) float64 { return x.s }), med(func(x r) float64 { return x.w }))
	}
	return true
}
