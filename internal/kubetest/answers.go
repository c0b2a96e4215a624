// SPDX-License-Identifier: Apache-2.0

package kubetest

import (
	"fmt"
	"net/http"
	"strings"
)

// resource is what a path selects.
type resource struct {
	group, version  string // version is that of objects, with the group
	namespace, name string
	kind            string
	custom          bool // it has a definition: each object of a list says its kind
}

// resourceOf reads a path as /api/v1/namespaces/default/pods or /apis/GROUP/VERSION/NAME.
func resourceOf(path string) (r resource) {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	r.version, parts = parts[1], parts[2:]
	if strings.HasPrefix(path, "/apis/") {
		r.group, r.version, parts = r.version, r.version+"/"+parts[0], parts[1:]
	}
	if len(parts) == 3 {
		r.namespace, parts = parts[1], parts[2:]
	}
	r.name = parts[0]
	switch r.name {
	case "pods":
		r.kind = "Pod"
	case "endpointslices":
		r.kind = "EndpointSlice"
	case "inferencepools":
		r.kind, r.custom = "InferencePool", true
	default:
		r.kind, r.custom = "DynamoWorkerMetadata", true
	}
	return r
}

// refusal answers with a status that is an error.
func refusal(w http.ResponseWriter, r *http.Request, code int, verb string) {
	switch code {
	case http.StatusUnauthorized:
		status(w, code, `{}`, "Unauthorized", "Unauthorized", "")
	case http.StatusForbidden:
		at := resourceOf(r.URL.Path)
		name, scope := at.name, "at the cluster scope"
		details := fmt.Sprintf(`"kind":%q`, at.name)
		if at.group != "" {
			name += "." + at.group
			details = fmt.Sprintf(`"group":%q,`, at.group) + details
		}
		if only, ok := onlyName(r); ok {
			name += fmt.Sprintf(" %q", only)
			details = fmt.Sprintf(`"name":%q,`, only) + details
		}
		if at.namespace != "" {
			scope = fmt.Sprintf("in the namespace %q", at.namespace)
		}
		message := fmt.Sprintf("%s is forbidden: User %q cannot %s resource %q in API group %q %s",
			name, "system:serviceaccount:models:kvroute", verb, at.name, at.group, scope)
		status(w, code, `{}`, "Forbidden", message, details)
	case http.StatusNotFound: // no such resource
		http.Error(w, "404 page not found", code)
	case http.StatusGone:
		status(w, code, `{"continue":"rest"}`, "Expired", expiredPages, "")
	default:
		status(w, code, `{}`, strings.ReplaceAll(http.StatusText(code), " ", ""), http.StatusText(code), "")
	}
}

const expiredPages = "The provided continue parameter is too old to display a consistent list result. You can start a " +
	"new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the " +
	"results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or " +
	"deleted between the time the first chunk was returned and now may show up in the list."

func status(w http.ResponseWriter, code int, metadata, reason, message, details string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	fmt.Fprintln(w, statusText(code, metadata, reason, message, details))
}

func statusText(code int, metadata, reason, message, details string) string {
	if details != "" {
		details = `"details":{` + details + `},`
	}
	return fmt.Sprintf(
		`{"kind":"Status","apiVersion":"v1","metadata":%s,"status":"Failure","message":%q,"reason":%q,%s"code":%d}`,
		metadata, message, reason, details, code)
}
