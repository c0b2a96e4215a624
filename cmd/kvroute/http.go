// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvroute/kvroute/api"
)

// maxAnswer is the most that is read of an answer, in bytes.
const maxAnswer = 64 << 20

// apiClient asks the API of a running kvroute.
type apiClient struct {
	url, tokenFile string
	http           *http.Client
	token          string
}

func (c *apiClient) flags(fs *flag.FlagSet) {
	fs.StringVar(&c.url, "url", "http://127.0.0.1:9003", "`URL` of kvroute's API")
	fs.StringVar(&c.tokenFile, "api-token-file", "", "`file` whose first line is the token that opens the API")
	c.http = http.DefaultClient
}

// readToken reads the token, if there is a file with one.
func (c *apiClient) readToken() error {
	if c.tokenFile == "" {
		return nil
	}
	tokens, err := api.ReadTokens(c.tokenFile)
	if err == nil {
		c.token = tokens[0]
	}
	return err
}

// open asks for a path. The caller closes the body of the answer.
func (c *apiClient) open(ctx context.Context, path string) (*http.Response, error) {
	return open(ctx, c.http, strings.TrimRight(c.url, "/")+path, c.token)
}

// read asks for a path and decodes the answer.
func (c *apiClient) read(ctx context.Context, path string, into any) error {
	resp, err := c.open(ctx, path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(into); err != nil {
		return fmt.Errorf("read the answer of %s: %w", resp.Request.URL, err)
	}
	return nil
}

// open fetches a URL, with a bearer token if there is one. An answer with another status
// than 200 is an error with what the answer says; else the caller closes its body.
func open(ctx context.Context, client *http.Client, url, token string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token) // which does not follow to other hosts
	}
	resp, err := client.Do(req)
	if err != nil || resp.StatusCode == http.StatusOK {
		return resp, err
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // a part of it says enough
	_ = resp.Body.Close()
	var e struct{ Error struct{ Message string } } // the form of the API's errors
	if json.Unmarshal(text, &e) == nil && e.Error.Message != "" {
		text = []byte(e.Error.Message)
	}
	return nil, fmt.Errorf("%s answers with status %d: %s", url, resp.StatusCode, bytes.TrimSpace(text))
}

// fetch is open for answers that are read whole.
func fetch(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	resp, err := open(ctx, client, url, "")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
}

// serveHTTP adds a server to the parts of a command, which ends with ctx at once.
func serveHTTP(ctx context.Context, parts *errgroup.Group, at net.Listener, h http.Handler) {
	// On a busy machine a client may need seconds from its connection to its headers.
	server := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	parts.Go(func() error {
		if err := server.Serve(at); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	parts.Go(func() error {
		<-ctx.Done()
		return server.Close()
	})
}
