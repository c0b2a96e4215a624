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

// fetchMax is the most that is read of an answer.
const fetchMax = 64 << 20

// open sends a request without a body, with a bearer token if there is one. An answer
// with another status than 200 is an error with what the answer says; else the caller
// closes its body.
func open(ctx context.Context, client *http.Client, method, url, token string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token) // which does not follow to other hosts
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // what came of it says enough
		_ = resp.Body.Close()
		var e struct{ Error struct{ Message string } } // the form of the API's errors
		if json.Unmarshal(text, &e) == nil && e.Error.Message != "" {
			text = []byte(e.Error.Message)
		}
		return nil, fmt.Errorf("%s answers with status %d: %s", url, resp.StatusCode, bytes.TrimSpace(text))
	}
	return resp, nil
}

// fetch is open for answers that are read whole.
func fetch(ctx context.Context, client *http.Client, method, url string) ([]byte, error) {
	resp, err := open(ctx, client, method, url, "")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(io.LimitReader(resp.Body, fetchMax))
}

// apiFlags are those of commands that ask a running kvroute.
type apiFlags struct{ url, tokenFile string }

func (f *apiFlags) add(fs *flag.FlagSet) {
	fs.StringVar(&f.url, "url", "http://127.0.0.1:9003", "`URL` of kvroute's API")
	fs.StringVar(&f.tokenFile, "api-token-file", "", "`file` whose first line is the token that opens it")
}

// get asks for a path of the API.
func (f *apiFlags) get(ctx context.Context, path string) (*http.Response, error) {
	token, err := f.token()
	if err != nil {
		return nil, err
	}
	return open(ctx, http.DefaultClient, http.MethodGet, strings.TrimRight(f.url, "/")+path, token)
}

// token is what opens the API; empty for one that is open.
func (f *apiFlags) token() (string, error) {
	if f.tokenFile == "" {
		return "", nil
	}
	tokens, err := api.ReadTokens(f.tokenFile)
	if err != nil {
		return "", err
	}
	return tokens[0], nil
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
