// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/internal/reach"
)

// maxAnswer is how many bytes of an answer are read.
const maxAnswer = 64 << 20

// defaultAPI is where `kvroute serve` has its API by default.
const defaultAPI = "http://127.0.0.1:9003"

// apiClient reads the API of a running kvroute.
type apiClient struct {
	url, tokenFile string
	http           *http.Client
	token          string
}

func (c *apiClient) flags(fs *flag.FlagSet) {
	fs.StringVar(&c.url, "url", defaultAPI, "`URL` of kvroute's API")
	fs.StringVar(&c.tokenFile, "api-token-file", "", "`file` whose first line is the token that opens the API")
	c.http = http.DefaultClient
}

// readToken reads the token from its file, if there is one.
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

// open requests a path, in a media type unless that is "". An answer with another status than 200 is
// an error with the answer's text; otherwise the caller closes its body.
func (c *apiClient) open(ctx context.Context, path, accept string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(c.url, "/")+path, nil)
	if err != nil {
		return nil, c.wrongURL(err)
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token) // not sent to other hosts after a redirect
	}
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.wrongURL(err)
	} else if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // the beginning is enough
	_ = resp.Body.Close()
	address, _, _ := strings.Cut(req.URL.String(), "?") // the query may have a long id
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(text, &e) == nil && e.Error.Message != "" {
		return nil, apiError(fmt.Sprintf("%s answers with status %d: %s", address, resp.StatusCode, e.Error.Message))
	}
	return nil, c.wrongURL(fmt.Errorf("%s answers with status %d: %s", address, resp.StatusCode, bytes.TrimSpace(text)))
}

// read requests a path and decodes the answer. Numbers of unknown type keep their digits.
func (c *apiClient) read(ctx context.Context, path string, into any) error {
	resp, err := c.open(ctx, path, "")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer))
	dec.UseNumber()
	if err := dec.Decode(into); err != nil {
		return c.wrongURL(fmt.Errorf("read the answer of %s: %w", resp.Request.URL, err))
	}
	return nil
}

func (c *apiClient) wrongURL(err error) error {
	return fmt.Errorf("%w; --url is %q, want the http-address of a running kvroute, as %s", err, c.url, defaultAPI)
}

// apiError is an error that kvroute's API answered with.
type apiError string

func (e apiError) Error() string { return string(e) }

// healthcheck requests a URL, for images without an HTTP client.
func healthcheck(ctx context.Context, args []string, std stdio) error {
	fs := newFlagSet("healthcheck")
	url := fs.String("url", "http://127.0.0.1:9003/readyz", "`URL` to ask")
	if err := parse(fs, args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_, err := reach.Get(ctx, http.DefaultClient, "", *url, maxAnswer)
	return err
}

// writeJSON writes a command's result for programs.
func writeJSON(out io.Writer, result any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(result)
}
