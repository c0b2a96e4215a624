// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/internal/silence"
	"github.com/kvroute/kvroute/top"
)

// answerTime is how long kvroute may take to begin an answer.
const answerTime = 10 * time.Second

// showTop shows live what a running kvroute does.
func showTop(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("top")
	var from apiClient
	from.flags(fs)
	once := fs.Bool("once", false, "print one picture as plain text and exit")
	output := fs.String("output", "text", "text or json: the form of the output. "+
		"json prints an object on a line for each section that changes, with --once one object with all sections")
	if err := errors.Join(parse(fs, args), from.readToken()); err != nil {
		return err
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.ResponseHeaderTimeout = answerTime
	dialer := net.Dialer{Timeout: answerTime}
	silence.Limit(&dialer)
	transport.DialContext = dialer.DialContext
	defer transport.CloseIdleConnections()
	from.http = &http.Client{Transport: transport}
	terminal, isFile := std.out.(*os.File)
	switch {
	case *output != "text" && *output != "json":
		return fmt.Errorf("output is %q, want text or json", *output)
	case *once:
		ctx, cancel := context.WithTimeout(ctx, answerTime)
		defer cancel()
		return top.Once(ctx, from.live, std.out, *output == "json")
	case *output == "json":
		return top.Stream(ctx, from.live, std.out, std.err)
	case isFile:
		if info, err := terminal.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			return top.Show(ctx, from.live, os.Stdin, terminal)
		}
	}
	return errors.New("the output is not a terminal: add --once or --output json")
}

// live is a [top.Source].
func (c *apiClient) live(ctx context.Context, stream bool) (io.ReadCloser, error) {
	accept := "application/json"
	if stream {
		accept = "text/event-stream"
	}
	resp, err := c.open(ctx, "/v1/live", accept)
	if err == nil {
		return resp.Body, nil
	}
	var r api.Replica
	if _, ofAPI := errors.AsType[apiError](err); !ofAPI && c.read(ctx, "/v1/replica", &r) == nil {
		err = fmt.Errorf("the kvroute at %s has version %s, which does not serve /v1/live: update it", c.url, r.Version)
	}
	return nil, err
}
