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
	"net/http"
	"strings"

	"github.com/kvroute/kvroute/api"
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

// open requests a path, in a media type unless that is "". The caller closes the body of the answer.
func (c *apiClient) open(ctx context.Context, path, accept string) (*http.Response, error) {
	resp, err := open(ctx, c.http, strings.TrimRight(c.url, "/")+path, c.token, accept)
	if _, ofAPI := errors.AsType[apiError](err); err != nil && !ofAPI {
		err = c.wrongURL(err)
	}
	return resp, err
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

// apiError is an error that kvroute's API, or an engine's, answered with.
type apiError string

func (e apiError) Error() string { return string(e) }

// open requests a URL, with a bearer token and in a media type if there are such. Errors are those of
// do.
func open(ctx context.Context, client *http.Client, url, token, accept string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token) // not sent to other hosts after a redirect
	}
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	return do(client, req)
}

// do sends a request. An answer with another status than 200 is an error with the answer's
// text; otherwise the caller closes its body.
func do(client *http.Client, req *http.Request) (*http.Response, error) {
	resp, err := client.Do(req)
	if err != nil || resp.StatusCode == http.StatusOK {
		return resp, err
	}
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // the beginning is enough
	_ = resp.Body.Close()
	var e struct{ Error struct{ Message string } }
	if json.Unmarshal(text, &e) == nil && e.Error.Message != "" {
		return nil, apiError(fmt.Sprintf("%s answers with status %d: %s", req.URL, resp.StatusCode, e.Error.Message))
	}
	return nil, fmt.Errorf("%s answers with status %d: %s", req.URL, resp.StatusCode, bytes.TrimSpace(text))
}

// writeJSON writes a command's result for programs.
func writeJSON(out io.Writer, result any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(result)
}
