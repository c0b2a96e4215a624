// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
)

// HeldPaths is a regular expression of the paths about one stored response, without a query. Neither a percent sign nor
// a slash may be escaped: a worker must not find another path in what is left.
const HeldPaths = `/v1/responses/([^/%?]|%[013-9A-Fa-f][0-9A-Fa-f]|%2[0-46-9A-Ea-e])+(/cancel|/input_items)?`

// maxHeldTarget bounds the paths that HeldID reads, in bytes. Ids have some 40.
const maxHeldTarget = 2048

// HeldID returns the id of the stored response that a request is about, by its path; "" for another request.
func HeldID(target string) string {
	if len(target) > maxHeldTarget || !strings.Contains(target, "responses") {
		return ""
	}
	below, isBelow := strings.CutPrefix(normalPath(target), "/v1/responses/")
	id, what, more := strings.Cut(below, "/")
	if !isBelow || more && what != "cancel" && what != "input_items" {
		return ""
	}
	return id
}

// held returns the id in a body of what a worker keeps: the response that the request continues, or the session.
func (f *fields) held(e Endpoint) string {
	switch e {
	case Responses:
		if id := f.get("previous_response_id").textOr(""); id != "" {
			return id
		}
		conversation := f.get("conversation")
		return conversation.textOr(conversation.textAt("id"))
	case CloseSession:
		return f.get("session_id").textOr("")
	case Generate:
		params := f.get("session_params")
		return cmp.Or(params.textAt("id"), params.first().textAt("id")) // a list has one for each prompt
	case Other, ChatCompletions, Completions, Messages, Ids, Load, Text, OpenSession:
	}
	return ""
}

// GivesID reports whether the response to a request for e may give out an id: see [GivenID].
func (e Endpoint) GivesID() bool { return e == Responses || e == OpenSession }

// ErrUnfinished says that a text ends before the id.
var ErrUnfinished = errors.New("openai: the text ends before the id")

// GivenID returns the id that a worker gives out in the beginning of a response: the member id of an object, or a text
// alone, as SGLang answers /open_session. It returns [ErrUnfinished] if the id may still come, and "" if the text has
// none.
func GivenID(text []byte) (id string, err error) { return readID(text, "id") }

// GivenIDInEvent is [GivenID] for the data of an event of /v1/responses: only the id of its response counts.
func GivenIDInEvent(data []byte) (id string, err error) { return readID(data, "response") }

func readID(text []byte, member string) (id string, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	id, err = idAt(d, member)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return "", ErrUnfinished
	}
	if err != nil {
		return "", nil //nolint:nilerr // a text that is not JSON has no id
	}
	return id, nil
}

// idAt reads up to the id: in the member id of an object, or in that of its member response.
func idAt(d *json.Decoder, member string) (id string, err error) {
	switch first, err := d.Token(); v := first.(type) {
	case string:
		if member == "id" {
			return v, err
		}
		return "", err
	case json.Delim:
		if v != '{' {
			return "", nil
		}
	default:
		return "", err
	}
	for {
		name, err := d.Token()
		switch {
		case err != nil || name == json.Delim('}'):
			return "", err
		case name != member:
			var skipped json.RawMessage
			if err := d.Decode(&skipped); err != nil {
				return "", err
			}
		case member == "response":
			return idAt(d, "id")
		default:
			var v any
			err = d.Decode(&v)
			id, _ = v.(string)
			return id, err
		}
	}
}

// wrongOnHeld returns the error for a method that a stored response does not have. So no body that engines read, now or
// later, passes there unchecked.
func wrongOnHeld(method, p string) *Error {
	switch method {
	case http.MethodPost:
		if strings.HasSuffix(p, "/cancel") {
			return nil
		}
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodDelete:
		return nil
	}
	if HeldID(p) == "" {
		return nil
	}
	return &Error{
		Status: http.StatusNotFound, Type: InvalidRequest, Code: "unknown_path",
		Message: method + " is not served below /v1/responses/, except for POST on a response's cancel",
	}
}
