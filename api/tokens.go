// SPDX-License-Identifier: Apache-2.0

package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"

	"github.com/kvroute/kvroute/internal/openai"
)

// Tokens are the bearer tokens for the API: the lines of a file. Each line is valid, so that a new
// token can replace an old one without a gap. Only their hashes are kept. The file may be read
// again beside any number of requests.
type Tokens struct {
	path string
	sums atomic.Pointer[[][sha256.Size]byte] // never empty
}

const (
	// minToken is the length of the shortest token that cannot be guessed: 96 bits in base64.
	minToken = 16
	// maxTokenFile limits the size of the file: some hundred tokens.
	maxTokenFile = 64 << 10
)

// OpenTokens reads the file at path.
func OpenTokens(path string) (*Tokens, error) {
	t := &Tokens{path: path}
	commit, err := t.Read()
	if err != nil {
		return nil, err
	}
	commit()
	return t, nil
}

// Read reads the file again. The new tokens are valid once commit is called. An error names the
// file and the line, and the old tokens stay valid.
func (t *Tokens) Read() (commit func(), err error) {
	list, err := ReadTokens(t.path)
	if err != nil {
		return nil, err
	}
	sums := make([][sha256.Size]byte, len(list))
	for i, token := range list {
		sums[i] = sha256.Sum256([]byte(token))
	}
	return func() { t.sums.Store(&sums) }, nil
}

// ReadTokens returns the tokens of a file: one or more. It ignores empty lines.
func ReadTokens(path string) (tokens []string, err error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("api-token-file: %w", err)
	}
	defer func() { _ = file.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(file, maxTokenFile+1))
	if err == nil && len(text) > maxTokenFile {
		err = fmt.Errorf("%s has more than %d bytes", path, maxTokenFile)
	}
	if err != nil {
		return nil, fmt.Errorf("api-token-file: %w", err)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		token := strings.TrimSpace(line)
		if token == "" {
			continue
		}
		if len(token) < minToken || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, fmt.Errorf("api-token-file: %s:%d is no token, want %d or more visible ASCII characters", path, n, minToken)
		}
		tokens = append(tokens, token)
	}
	if len(tokens) == 0 {
		return nil, fmt.Errorf("api-token-file: %s holds no token", path)
	}
	return tokens, nil
}

// has reports whether a token is valid, in constant time.
func (t *Tokens) has(token string) bool {
	sum, found := sha256.Sum256([]byte(token)), 0
	for _, s := range *t.sums.Load() {
		found |= subtle.ConstantTimeCompare(s[:], sum[:])
	}
	return found == 1
}

// guard passes a request to h if it has a valid token or its path is [open].
func (t *Tokens) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		what := "the token in the header Authorization is not one of kvroute's --api-token-file"
		switch bearer := strings.EqualFold(scheme, "Bearer"); {
		case open(r.URL.Path), bearer && t.has(strings.TrimSpace(token)):
			h.ServeHTTP(w, r)
			return
		case scheme == "":
			what = "there is no header Authorization"
		case !bearer:
			what = "the header Authorization is not of the form Bearer TOKEN"
		}
		w.Header().Set("WWW-Authenticate", `Bearer realm="kvroute"`)
		e := openai.Error{Status: http.StatusUnauthorized, Message: what, Type: "authentication_error", Param: "Authorization", Code: "unauthorized"}
		e.Write(w)
	})
}
