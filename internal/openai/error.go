// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
)

// Types of errors.
const (
	InvalidRequest = "invalid_request_error"
	NotFound       = "not_found_error"
	Unavailable    = "service_unavailable"
	Overloaded     = "overloaded_error"
)

// Error is a refusal in OpenAI's form.
type Error struct {
	Status  int    // HTTP status
	Message string // a sentence for the client, without text of its prompt
	Type    string // one of the types above
	Param   string // field of the body, or ""
	Code    string // machine-readable reason, or ""
	Retry   int    // value of the header Retry-After in seconds; 0 = no header
	allow   string // the right method, with status 405; default POST
}

// Error returns status and message.
func (e *Error) Error() string { return fmt.Sprintf("%d: %s", e.Status, e.Message) }

// JSON returns the error as the body of a response. An empty Param or Code is
// null there.
func (e *Error) JSON() []byte {
	type detail struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    *string `json:"code"`
	}
	// Strings always marshal; invalid UTF-8 is replaced.
	out, _ := json.Marshal(map[string]detail{"error": {e.Message, e.Type, optional(e.Param), optional(e.Code)}})
	return out
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// Headers returns the headers of the response, as name, value, name, value. With status 405
// they say which method is right.
func (e *Error) Headers() []string {
	headers := []string{"content-type", "application/json"}
	if e.Status == http.StatusMethodNotAllowed {
		headers = append(headers, "allow", cmp.Or(e.allow, http.MethodPost))
	}
	if e.Retry > 0 {
		headers = append(headers, "retry-after", strconv.Itoa(e.Retry))
	}
	return headers
}

// Write answers a request with the error.
func (e *Error) Write(w http.ResponseWriter) {
	for pair := range slices.Chunk(e.Headers(), 2) {
		w.Header().Set(pair[0], pair[1])
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON()) // an error means that the client has left
}

func bad(param, message string) *Error {
	return &Error{Status: http.StatusBadRequest, Message: message, Type: InvalidRequest, Param: param}
}
