// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"encoding/json"
	"fmt"
	"net/http"
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
	type response struct {
		Error detail `json:"error"`
	}
	// Strings always marshal; invalid UTF-8 is replaced.
	out, _ := json.Marshal(response{detail{e.Message, e.Type, optional(e.Param), optional(e.Code)}})
	return out
}

func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// Write answers a request with the error. A status 405 says which method is
// right.
func (e *Error) Write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	if e.Status == http.StatusMethodNotAllowed {
		w.Header().Set("Allow", http.MethodPost)
	}
	if e.Retry > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(e.Retry))
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON()) // the client's connection is the client's business
}

func bad(param, message string) *Error {
	return &Error{Status: http.StatusBadRequest, Message: message, Type: InvalidRequest, Param: param}
}
